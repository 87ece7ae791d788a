"""Repeat, spell and sort: answers made of the words just given, position by position."""

from random import Random

from millpond.tasks.dialogue import Message, Split, assistant, user
from millpond.tasks.words import ADJECTIVES, NOUNS, PHRASES, code, letters, name, syllable_word

_REPEAT = ("Repeat: {w}", "Repeat these words: {w}", "Say exactly this: {w}", "Copy: {w}",
           "Repeat after me: {w}", "Echo {w}")  # fmt: skip
_SPELL = ("Spell {w}.", "Spell the word {w}.", "How do you spell {w}?", "spell {w}")
_SORT = ("Sort these {s}: {w}", "Sort: {w}", "Put these {s} in order: {w}", "sort {w}",
         "Please sort this list of {s}: {w}")  # fmt: skip


_MOST_STRANGE = 10
"""Made-up words, codes and numbers are many tokens each; a list of them is as long in tokens as one
of nouns."""


def words(dice: Random, count: int) -> list[str]:
    """`count` words of one sort, repetitions allowed; fewer where they are made up."""
    sort = dice.random()
    if sort < 0.5:
        return [dice.choice(NOUNS) for _ in range(count)]
    if sort < 0.62:
        return [letters(dice) for _ in range(min(count, _MOST_STRANGE))]
    if sort < 0.72:
        return [syllable_word(dice, dice.randint(1, 3)) for _ in range(min(count, _MOST_STRANGE))]
    if sort < 0.8:
        return [code(dice) for _ in range(min(count, _MOST_STRANGE))]
    if sort < 0.9:
        return [str(dice.randint(0, 99)) for _ in range(min(count, _MOST_STRANGE))]
    return [dice.choice((*PHRASES, *NOUNS, *ADJECTIVES)) for _ in range(count)]


def repeat(dice: Random, count: int) -> list[Message]:
    """Say the given words again."""
    text = " ".join(words(dice, count))
    return [user(dice.choice(_REPEAT).format(w=text)), assistant(text)]


def spell(dice: Random, split: Split) -> list[Message]:
    """A word or name, letter by letter."""
    pick = dice.random()
    if pick < 0.5:
        word = dice.choice(NOUNS)
    elif pick < 0.9:
        word = syllable_word(dice, 2) if pick < 0.7 else letters(dice)
    else:
        word = name(dice, split)
    return [user(dice.choice(_SPELL).format(w=word)), assistant("-".join(word))]


def sort(dice: Random, count: int) -> list[Message]:
    """Numbers ascending, or words in alphabetical order."""
    sort_name = "numbers" if dice.random() < 0.65 else "words"
    if sort_name == "numbers":
        top = dice.choice((9, 20, 99, 99))
        numbers = [dice.randint(0, top) for _ in range(count)]
        given, right = [str(n) for n in numbers], [str(n) for n in sorted(numbers)]
    else:
        nouns = dice.sample(NOUNS, min(count, 6))
        given, right = nouns, sorted(nouns)
    joiner = dice.choice((", ", ", ", " "))
    question = dice.choice(_SORT).format(s=sort_name, w=joiner.join(given))
    return [user(question), assistant(joiner.join(right))]
