"""Sums, differences and small products, with a short think block where one helps."""

from random import Random

from millpond.tasks.dialogue import Message, Split, assistant, user
from millpond.tasks.split import is_held_out

_BRIEF = (
    "What is {e}? Answer briefly.",
    "What is {e}? Answer with a number only.",
    "{e} = ? Number only.",
    "Please compute {e}. Answer briefly.",
    "How much is {e}? Just the number.",
    "What's {e}? Be brief.",
    "Answer briefly: what is {e}?",
)
_FULL = (
    "What is {e}?", "what is {e}?", "What's {e}?", "{e}", "{e} =", "{e} = ?", "Compute {e}.",
    "Calculate {e}", "How much is {e}?", "Can you tell me what {e} is?", "whats {e}",
)  # fmt: skip
_SIGNS = {"+": ("+", " + ", " plus "), "-": ("-", " - ", " minus "), "*": ("*", " x ", " times ")}


def operands(dice: Random, split: Split, op: str) -> tuple[int, int]:
    """Two operands of `split`; single-digit sums and small products are facts, never held out."""
    while True:
        if op == "*":
            a, b = dice.randint(0, 12), dice.randint(0, 12)
            return a, b
        top = dice.choices((9, 99, 999), (0.3, 0.5, 0.2))[0]
        low = 0 if split == "train" else 10
        a, b = dice.randint(0, top), dice.randint(0, min(top, 99) if op == "-" else top)
        if max(a, b) < low:
            continue
        if op == "-" and a < b:
            a, b = b, a
        subject = sorted((a, b)) if op == "+" else [a, b]
        if max(a, b) < 10 or is_held_out("sum", op, *subject) == (split == "heldout"):
            return a, b


def worked(a: int, b: int) -> str:
    """Column addition from the right, one line of thought."""
    steps, carry = [], 0
    for x, y in zip(str(a).zfill(3)[::-1], str(b).zfill(3)[::-1], strict=True):
        if int(x) + int(y) + carry == 0 and x == y == "0":
            break
        total = int(x) + int(y) + carry
        steps.append(f"{x} + {y}{' + 1' if carry else ''} = {total}")
        carry = total // 10
    return ", ".join(steps)


def turn(dice: Random, split: Split, effort: str | None) -> list[Message]:
    """One question and its answer."""
    op = dice.choices("+-*", (0.7, 0.2, 0.1))[0]
    a, b = operands(dice, split, op)
    result = {"+": a + b, "-": a - b, "*": a * b}[op]
    expression = f"{a}{dice.choice(_SIGNS[op])}{b}"
    if op == "+" and dice.random() < 0.15:
        expression = f"the sum of {a} and {b}"
    if dice.random() < 0.5:
        return [user(dice.choice(_BRIEF).format(e=expression)), assistant(str(result))]
    thinks = op == "+" and max(a, b) >= 10 and effort != "low"
    shown = f"{a} {op} {b} = {result}."
    question = dice.choice(_FULL).format(e=expression)
    return [user(question), assistant(shown, worked(a, b) if thinks else "")]
