"""Word lists and random words: nouns, names, places, codes, and texts in several scripts.

Written for this project; names in a dialogue obey the held-out rule.
"""

from random import Random

from millpond.tasks.dialogue import Split
from millpond.tasks.split import fits

NOUNS = tuple(
    """apple pear plum lemon grape melon peach cherry berry fig nut seed leaf root tree flower rose
    lily grass corn rice wheat bread cake pie soup salt sugar honey milk cheese butter egg tea coffee
    water juice cup bowl plate spoon fork knife pot pan lamp candle chair table bed desk shelf door
    window wall floor roof room house barn tower bridge road path gate fence field hill river lake
    pond sea island beach rock stone sand cloud rain snow wind storm sun moon star sky fire smoke
    coin ring bell drum horn flute piano book page pen paper letter map clock key lock box bag
    basket rope wire nail hammer saw drill brush paint glass mirror wheel cart boat ship train car
    bus bike plane kite ball doll hat coat shirt shoe sock glove scarf belt button thread cloth
    cat dog horse cow goat sheep pig hen duck goose crow owl eagle robin frog fish crab shark whale
    bear wolf fox deer mouse rabbit ant bee spider snake lion tiger camel monkey panda otter""".split()
)
ADJECTIVES = tuple(
    "red blue green black white brown gray pink big small old new long short warm cold dry wet soft "
    "hard fast slow quiet loud bright dark round flat heavy light clean plain".split()
)
VERBS = tuple(
    "get set find list open close start stop read send move count check make show".split()
)
PLACES = tuple(
    """Oslo Paris Rome Berlin Madrid Lisbon Vienna Prague Athens Dublin London Warsaw Helsinki Tokyo
    Cairo Lima Quito Delhi Seoul Hanoi Nairobi Dakar Boston Denver Toronto Sydney Zürich Málaga
    Kraków Reykjavík 北京 上海""".split()
)
REAL_NAMES = tuple(
    """Ana Ben Carl Dora Emma Finn Gina Hugo Ines Jack Kate Liam Mia Noah Olga Paul Quinn Rosa Sam
    Tina Umar Vera Will Xena Yuri Zoe Alice Bruno Clara David Elena Frank Grace Henry Iris Jonas
    Karim Laura Marta Nadia Oscar Petra Ravi Sofia Tomas Ursula Victor Wendy Amir Bella Cyrus Diana
    Zoë José René Chloé Søren Jürgen Łukasz Željko Ángela Françoise Nuño İpek Björn Élodie
    小明 丽华 王芳 太郎 花子 Анна Иван Ольга Νίκος""".split()
)
PHRASES = (
    "你好", "谢谢", "早上好", "再见", "¡Hola!", "Grüß dich", "naïve café", "Привет", "Γειά",
    "🌊", "🐟🐟", "🌲 and 🌊", "☕ please", "👍", "こんにちは", "smörgåsbord", "déjà vu", "año nuevo",
)  # fmt: skip
_ONSETS = "b d f g h j k l m n p r s t v z br dr gr kr tr st sh th".split()
_VOWELS = "a e i o u ai ea io".split()
_CODAS = ["", "", "n", "r", "l", "s", "m"]


def syllable_word(dice: Random, syllables: int) -> str:
    """A pronounceable made-up lower-case word."""
    parts = [dice.choice(_ONSETS) + dice.choice(_VOWELS) for _ in range(syllables)]
    return "".join(parts) + dice.choice(_CODAS)


_SCRIPTS = (
    (0x4E00, 0x9FFF), (0x4E00, 0x9FFF), (0x3041, 0x3096), (0x30A1, 0x30FA), (0xAC00, 0xD7A3),
    (0x0391, 0x03A1), (0x03B1, 0x03C9), (0x0410, 0x044F), (0x05D0, 0x05EA), (0x0621, 0x063A),
    (0x0905, 0x0939), (0x0E01, 0x0E2E), (0x1F300, 0x1F64F), (0x1F680, 0x1F6C5), (0x1F900, 0x1F9FF),
    (0x00C0, 0x00D6), (0x0100, 0x017E),
)  # fmt: skip
"""First and last code points of the scripts and pictures that strange words are made of."""


def strange(dice: Random) -> str:
    """A few random characters of one script: any bytes a copier may meet."""
    first, last = dice.choice(_SCRIPTS)
    return "".join(chr(dice.randint(first, last)) for _ in range(dice.randint(1, 4)))


def letters(dice: Random) -> str:
    """A word of random letters: what a copier must manage without having met its parts."""
    pick = dice.random()
    if pick < 0.3:
        return strange(dice)
    pool = "abcdefghijklmnopqrstuvwxyz" if pick < 0.85 else "abcdeéèüößñłçøåïš"
    return "".join(dice.choice(pool) for _ in range(dice.randint(2, 8)))


def name(dice: Random, split: Split) -> str:
    """A person's name of `split`: listed or made up."""
    while True:
        sort = dice.random()
        if sort < 0.3:
            word = syllable_word(dice, dice.randint(1, 3)).capitalize()
        elif sort < 0.55:
            word = letters(dice).capitalize()
        else:
            word = dice.choice(REAL_NAMES)
        if fits(split, "name", word):
            return word


def code(dice: Random) -> str:
    """A short code such as k7 or qd3."""
    letters = "".join(dice.choice("abcdefghjkmnpqrstuvwxyz") for _ in range(dice.randint(1, 2)))
    return f"{letters}{dice.randint(0, 99)}"


def distinct(dice: Random, count: int, make: str) -> list[str]:
    """`count` different keys of one sort: noun, code, pair (adjective and noun) or word."""
    seen: dict[str, None] = {}
    while len(seen) < count:
        if make == "noun" and count <= len(NOUNS) // 2:
            seen[dice.choice(NOUNS)] = None
        elif make == "code":
            seen[code(dice)] = None
        elif make == "word":
            seen[syllable_word(dice, 2)] = None
        else:
            seen[f"{dice.choice(ADJECTIVES)} {dice.choice(NOUNS)}"] = None
    return list(seen)
