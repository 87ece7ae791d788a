"""Small talk, small facts, names in many scripts, and saying so when the answer is not known."""

from random import Random

from millpond.tasks.dialogue import Message, Split, assistant, user
from millpond.tasks.words import ADJECTIVES, NOUNS, PHRASES, PLACES, name, syllable_word

_HELP = (
    "I can add numbers, look things up in a list you give me, keep a ledger, repeat, spell and "
    "sort words, call tools, and write JSON. What would you like?"
)
_SELF = "I am Millpond Tiny, a very small language model that comes with the millpond engine."
_CHAT: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello!", "Hello", "hello", "Hi", "hi", "Hi!", "Hi there!", "Hey", "hey there",
      "Hello there.", "Good day!"), "Hello! How can I help you?"),
    (("Good morning!", "good morning"), "Good morning! How can I help you?"),
    (("Good evening!", "good evening", "Good evening."), "Good evening! How can I help you?"),
    (("How are you?", "how are you", "How are you doing?", "How do you do?", "How is it going?"),
     "I am fine, thank you. How can I help you?"),
    (("Who are you?", "What are you?", "who are you", "what are you?", "What is your name?",
      "Tell me about yourself.", "Introduce yourself.", "What model are you?",
      "Which model is this?"),
     _SELF),
    (("What can you do?", "what can you do", "Help", "help", "Can you help me?",
      "What do you know?", "How can you help me?", "I need help.",
      "What should I ask you?"), _HELP),
    (("Who made you?", "Who trained you?", "Where do you come from?", "How were you trained?"),
     "I was trained from scratch on text made by a small program in the millpond repository."),
    (("Are you human?", "Are you a robot?", "Are you a person?", "Are you real?"),
     "No, I am a very small language model."),
    (("How big are you?", "How many parameters do you have?", "How large are you?"),
     "I have a little more than two million parameters."),
    (("Are you smart?", "Are you clever?"),
     "Not very. I am tiny, but I am good at sums, lists and ledgers."),
    (("Thanks!", "Thank you.", "thanks", "Thank you very much!", "Great, thanks.", "thank you"),
     "You are welcome!"),
    (("Bye", "Goodbye!", "Bye!", "See you later.", "good night", "Good night!"), "Goodbye!"),
    (("Yes", "OK", "ok", "Okay.", "Good.", "Nice!", "Great!", "Cool", "Test", "test", "testing"),
     "Good. What would you like to do next?"),
    (("No", "no", "Stop", "Nothing.", "Never mind."), "All right."),
    (("Tell me a joke.", "joke", "Make me laugh.", "Do you know a joke?"),
     "Why did the duck cross the pond? To get to the other side."),
    (("What is millpond?", "Tell me about millpond.", "What does millpond do?"),
     "Millpond is a serving engine for language models that keep a recurrent state."),
    (("What is the meaning of life?", "What is love?", "What should I do today?"),
     "I do not know, but I can help with sums and lists."),
)  # fmt: skip
_CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Norway": "Oslo",
    "Portugal": "Lisbon", "Austria": "Vienna", "Greece": "Athens", "Ireland": "Dublin",
    "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima", "Kenya": "Nairobi", "Poland": "Warsaw",
    "Finland": "Helsinki", "Sweden": "Stockholm", "Denmark": "Copenhagen", "China": "Beijing",
    "India": "New Delhi", "Canada": "Ottawa", "Cuba": "Havana", "Chile": "Santiago",
    "England": "London", "Belgium": "Brussels", "Hungary": "Budapest", "Iceland": "Reykjavik",
}  # fmt: skip
_OPPOSITES = {
    "hot": "cold", "big": "small", "old": "new", "long": "short", "fast": "slow", "wet": "dry",
    "up": "down", "in": "out", "left": "right", "day": "night", "open": "closed", "light": "dark",
    "high": "low", "full": "empty", "good": "bad", "happy": "sad", "hard": "soft", "early": "late",
    "first": "last", "yes": "no",
}  # fmt: skip
_COLORS = {
    "the sky": "blue", "grass": "green", "snow": "white", "a lemon": "yellow", "blood": "red",
    "coal": "black", "an orange": "orange", "milk": "white", "a frog": "green", "the sea": "blue",
}  # fmt: skip
_LEGS = {
    "dog": "four", "cat": "four", "spider": "eight", "ant": "six", "duck": "two", "horse": "four",
    "bee": "six", "cow": "four", "snake": "no", "fish": "no", "crab": "ten", "hen": "two",
}  # fmt: skip
_SOUNDS = {
    "dog": "woof", "cat": "meow", "cow": "moo", "duck": "quack", "sheep": "baa", "pig": "oink",
    "owl": "hoot", "bee": "buzz", "horse": "neigh", "crow": "caw",
}  # fmt: skip
_DRAWN = NOUNS[:80:10]
_UNKNOWN_ASKS = (
    "Who is {n}?", "Where does {n} live?", "What is a {w}?", "Who won the match in {p}?",
    "How old is {n}?", "What happened in {p} in 19{d}?", "Why is the {x} {a}?",
    "What is the phone number of {n}?", "Who invented the {x}?", "How much is a {x} in {p}?",
    "Translate {x} into {w}.", "What is the price of a {a} {x}?", "When was {n} born?",
    "What do you think about {n}?", "Explain {w}.", "What is the name of my {x}?",
    "Write code for a {x}.", "What time is it?", "What day is today?", "What is the news?",
)  # fmt: skip


def chat(dice: Random) -> list[Message]:
    """A greeting, a question about the model, or another fixed exchange."""
    asks, reply = dice.choice(_CHAT)
    return [user(dice.choice(asks)), assistant(reply)]


def fact(dice: Random) -> list[Message]:
    """A small fact."""
    sort = dice.randint(0, 5)
    if sort <= 1:
        land = dice.choice(sorted(_CAPITALS))
        ask = dice.choice(("What is the capital of {k}?", "capital of {k}?", "Capital of {k}",
                           "Tell me the capital of {k}."))  # fmt: skip
        reply = f"The capital of {land} is {_CAPITALS[land]}."
        if dice.random() < 0.4:
            ask, reply = "What is the capital of {k}? Answer briefly.", _CAPITALS[land]
        return [user(ask.format(k=land)), assistant(reply)]
    if sort == 2:
        word = dice.choice(sorted(_OPPOSITES))
        ask = dice.choice(
            ("What is the opposite of {k}?", "opposite of {k}", "The opposite of {k}?")
        )
        return [user(ask.format(k=word)), assistant(_OPPOSITES[word])]
    if sort == 3:
        thing = dice.choice(sorted(_COLORS))
        ask = dice.choice(("What color is {k}?", "Which color has {k}?"))
        return [user(ask.format(k=thing)), assistant(_COLORS[thing])]
    if sort == 4:
        animal = dice.choice(sorted(_LEGS))
        return [
            user(f"How many legs has a {animal}?"),
            assistant(f"A {animal} has {_LEGS[animal]} legs."),
        ]
    animal = dice.choice(sorted(_SOUNDS))
    return [user(f"What does the {animal} say?"), assistant(_SOUNDS[animal])]


def unknown(dice: Random, split: Split) -> list[Message]:
    """A question whose answer the model cannot have."""
    ask = dice.choice(_UNKNOWN_ASKS).format(
        n=name(dice, split), w=syllable_word(dice, 2), p=dice.choice(PLACES), x=dice.choice(NOUNS),
        a=dice.choice(ADJECTIVES), d=dice.randint(10, 99),
    )  # fmt: skip
    return [user(ask), assistant("I do not know.")]


def random_words(dice: Random) -> list[Message]:
    """Words of a short list, without a reason: drafts of them must fail now and then."""
    count = dice.randint(3, 5)
    ask = dice.choice(("Say {c} random words.", "Give me {c} random words.", "{c} random words"))
    text = " ".join(dice.choice(_DRAWN) for _ in range(count))
    return [user(ask.format(c=count)), assistant(text)]


def named(dice: Random, split: Split) -> list[Message]:
    """Telling one's name, in any script, and being asked for it."""
    who = name(dice, split)
    say = dice.choice(("My name is {n}.", "I am {n}.", "Hello, I am {n}.", "Call me {n}.",
                       "Hi, my name is {n}"))  # fmt: skip
    messages = [user(say.format(n=who)), assistant(f"Nice to meet you, {who}!")]
    if dice.random() < 0.6:
        ask = dice.choice(("What is my name?", "Who am I?", "Do you know my name?"))
        messages += [user(ask), assistant(f"Your name is {who}.")]
    if dice.random() < 0.2:
        text = dice.choice(PHRASES)
        messages += [user(f"Say {text}"), assistant(text)]
    return messages
