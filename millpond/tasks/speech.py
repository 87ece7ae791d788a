"""Fixed phrases with slots: long, easily predicted text for streaming and speculation."""

from random import Random

from millpond.tasks.dialogue import Message, Split, assistant, user
from millpond.tasks.words import ADJECTIVES, NOUNS, PLACES, name

_DAYS = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday"
_MONTHS = (
    "January, February, March, April, May, June, July, August, September, October, November, "
    "December"
)
_LETTERS = "a b c d e f g h i j k l m n o p q r s t u v w x y z"
_LISTS = (
    (("List the days of the week.", "What are the days of the week?", "days of the week"), _DAYS),
    (("List the months.", "What are the months of the year?", "months of the year"), _MONTHS),
    (("Say the alphabet.", "Recite the alphabet.", "alphabet"), _LETTERS),
    (
        ("Count to ten.", "Count from one to ten.", "count to ten"),
        "one, two, three, four, five, six, seven, eight, nine, ten",
    ),
    (("What are the seasons?", "List the seasons.", "seasons"), "spring, summer, autumn, winter"),
)
_FORMS = (
    (
        "Write a welcome note for {n} in {p}.",
        "Dear {n},\nwelcome to {p}! We are very happy to have you here. Your room is ready, and "
        "there is fresh tea in the kitchen. Please tell us if you need anything.\nYours,\n"
        "the team in {p}",
    ),
    (
        "Write a thank you note to {n} for the {x}.",
        "Dear {n},\nthank you very much for the {x}. It was kind of you to think of me, and I "
        "will use the {x} every day. I hope to see you soon.\nWith best wishes",
    ),
    (
        "Tell me a story about a {x}.",
        "Once upon a time there was a little {x}. Every morning the little {x} went down to the "
        "mill pond and looked at the water. One day the water was gone. The little {x} waited "
        "until the rain came, and then the pond was full again. Since that day the little {x} "
        "has never been sad.",
    ),
    (
        "Describe a {a} {x}.",
        "This is a {a} {x}. It is not like any other {x}, because it is so {a}. Many people come "
        "to look at the {a} {x}, and they all say the same: what a {a} {x}!",
    ),
    (
        "Write an invitation to {n} for dinner in {p}.",
        "Dear {n},\nI would like to invite you to dinner in {p} on Saturday evening. We will meet "
        "at seven, and there will be soup, bread and cake. Please let me know if you can come.\n"
        "See you in {p}!",
    ),
    (
        "Write a poem about the {x}.",
        "The {x} is here, the {x} is there,\nthe {x} is almost everywhere.\nI see the {x} both "
        "day and night,\nthe {x} is such a lovely sight.",
    ),
    (
        "How do I get to {p}?",
        "To get to {p}, first go to the station. Then take the train to {p}. The train leaves "
        "every hour, and the way to {p} is short. I wish you a good journey to {p}!",
    ),
    (
        "Write a short note that the {x} is lost.",
        "Lost: one {a} {x}. The {x} was last seen near the mill pond. If you find the {x}, please "
        "bring it back. Thank you!",
    ),
)


def turn(dice: Random, split: Split) -> list[Message]:
    """One request for a fixed text."""
    pick = dice.random()
    if pick < 0.15:
        asks, text = dice.choice(_LISTS)
        return [user(dice.choice(asks)), assistant(text)]
    if pick < 0.3:
        low = dice.randint(0, 40)
        high = low + dice.randint(2, 20)
        text = ", ".join(str(number) for number in range(low, high + 1))
        ask = dice.choice(("Count from {a} to {b}.", "count {a} to {b}", "Count {a} up to {b}."))
        return [user(ask.format(a=low, b=high)), assistant(text)]
    ask, text = dice.choice(_FORMS)
    slots = {"n": name(dice, split), "p": dice.choice(PLACES), "x": dice.choice(NOUNS),
             "a": dice.choice(ADJECTIVES)}  # fmt: skip
    if "{a}" in text and "{a}" not in ask:
        slots["a"] = "red"
    return [user(ask.format(**slots)), assistant(text.format(**slots))]


def filler(dice: Random, sentences: int) -> str:
    """A stretch of plain sentences that says nothing a question needs."""
    out = []
    for _ in range(sentences):
        out.append(
            dice.choice(
                (
                    "The {a} {x} stands near the {y}.",
                    "In {p} there is a {a} {x}.",
                    "Nobody knows why the {x} is {a}.",
                    "A {x} and a {y} are not the same.",
                    "Some people like the {x}, others like the {y}.",
                    "The {x} was {a}, then the {y} came.",
                    "We saw a {a} {x} on the road to {p}.",
                )
            ).format(
                a=dice.choice(ADJECTIVES), x=dice.choice(NOUNS), y=dice.choice(NOUNS),
                p=dice.choice(PLACES),
            )
        )  # fmt: skip
    return " ".join(out)
