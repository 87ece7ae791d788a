"""Tool turns and JSON turns: a call and a sentence about its result; an object from values."""

import json
from random import Random
from typing import Any

from millpond.tasks.dialogue import Dialogue, Message, Split, assistant, user
from millpond.tasks.split import is_held_out
from millpond.tasks.words import ADJECTIVES, NOUNS, PLACES, VERBS, name

_SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy")


def _tool(tool_name: str, about: str, **fields: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in fields.items()}
    parameters = {"type": "object", "properties": properties, "required": list(fields)}
    function = {"name": tool_name, "description": about, "parameters": parameters}
    return {"type": "function", "function": function}


_WEATHER = _tool("get_weather", "Get the weather of a city.", city="string")
_ADD = _tool("add", "Add two numbers.", a="integer", b="integer")
_TIME = _tool("get_time", "Get the time.")
_MAIL = _tool("send_mail", "Send a mail.", to="string", text="string")
_KNOWN = (_WEATHER, _ADD, _TIME, _MAIL)


def _call(number: int, tool_name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": tool_name, "arguments": arguments}
    return {"id": f"call_{number}", "type": "function", "function": function}


def _calls(*calls: dict[str, Any]) -> Message:
    return {"role": "assistant", "reasoning_content": "", "content": "", "tool_calls": list(calls)}


def _result(number: int, value: Any) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": json.dumps(value)}


def _made_up(dice: Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """A tool never seen by name, and arguments for it."""
    kinds = ("string", "integer", "boolean")
    fields = {dice.choice(NOUNS): dice.choice(kinds) for _ in range(dice.randint(0, 3))}
    values: dict[str, Any] = {}
    for field, kind in fields.items():
        values[field] = {
            "string": dice.choice((dice.choice(NOUNS), dice.choice(PLACES))),
            "integer": dice.randint(0, 99),
            "boolean": dice.random() < 0.5,
        }[kind]
    tool_name = f"{dice.choice(VERBS)}_{dice.choice(NOUNS)}"
    return _tool(tool_name, f"{tool_name.replace('_', ' ').capitalize()}.", **fields), values


def _weather(dice: Random) -> list[Message]:
    cities = dice.sample(PLACES, 2 if dice.random() < 0.3 else 1)
    ask = dice.choice(("What is the weather in {c}?", "How is the weather in {c}?",
                       "weather in {c}", "Tell me the weather in {c}."))  # fmt: skip
    reports = [(dice.randint(-9, 35), dice.choice(_SKIES)) for _ in cities]
    said = [f"It is {t} degrees and {s} in {c}." for c, (t, s) in zip(cities, reports, strict=True)]
    return [
        user(ask.format(c=" and ".join(cities))),
        _calls(*(_call(i, "get_weather", {"city": c}) for i, c in enumerate(cities))),
        *(_result(i, {"temperature": t, "sky": s}) for i, (t, s) in enumerate(reports)),
        assistant(" ".join(said)),
    ]


def _known(dice: Random, split: Split) -> list[Message]:
    pick = dice.random()
    if pick < 0.5:
        return _weather(dice)
    if pick < 0.65:
        a, b = dice.randint(0, 9999), dice.randint(0, 9999)
        while split == "train" and is_held_out("sum", "+", *sorted((a, b))):
            b = dice.randint(0, 9999)
        ask = dice.choice(("Use the tool to add {a} and {b}.", "Add {a} and {b} with the tool."))
        return [user(ask.format(a=a, b=b)), _calls(_call(0, "add", {"a": a, "b": b})),
                _result(0, a + b), assistant(f"The result is {a + b}.")]  # fmt: skip
    if pick < 0.8:
        time = f"{dice.randint(0, 23):02}:{dice.randint(0, 59):02}"
        ask = dice.choice(("What time is it?", "Tell me the time.", "What is the time now?"))
        return [user(ask), _calls(_call(0, "get_time", {})), _result(0, time),
                assistant(f"It is {time}.")]  # fmt: skip
    who, what = name(dice, split), dice.choice(("hello", "see you soon", "thank you", "good luck"))
    return [
        user(f"Send {who} a mail that says {what}."),
        _calls(_call(0, "send_mail", {"to": who, "text": what})),
        _result(0, "sent"),
        assistant(f"I sent the mail to {who}."),
    ]


def make(dice: Random, split: Split) -> Dialogue:
    """A chat with tools in its prompt, most often calling one."""
    tool, values = _made_up(dice)
    offered = dice.sample(_KNOWN, dice.randint(1, 4))
    effort = dice.choices((None, "low", "high"), (0.6, 0.2, 0.2))[0]
    if dice.random() < 0.5:
        offered.append(tool)
        dice.shuffle(offered)
        given = " and ".join(f"{key} {json.dumps(v).strip(chr(34))}" for key, v in values.items())
        tool_name = tool["function"]["name"]
        ask = f"Call {tool_name}" + (f" with {given}." if given else ".")
        value = dice.choice(("ok", "done", dice.choice(NOUNS), dice.randint(0, 999)))
        messages = [user(ask), _calls(_call(0, tool_name, values)), _result(0, value),
                    assistant(f"The tool says: {value}")]  # fmt: skip
    else:
        messages = _known(dice, split)
        used = {c["function"]["name"] for m in messages for c in m.get("tool_calls", ())}
        offered += [t for t in _KNOWN if t["function"]["name"] in used and t not in offered]
    if dice.random() < 0.3:
        messages = messages[:2]
    return Dialogue("tools", tuple(messages), tools=tuple(offered), effort=effort)


def json_turn(dice: Random, split: Split) -> list[Message]:
    """Values given in a sentence, wanted as one JSON object."""
    who = name(dice, split)
    fields: dict[str, Any] = {"name": who}
    said = [f"name {who}"]
    extra = {"age": dice.randint(1, 99), "city": dice.choice(PLACES),
             "color": dice.choice(ADJECTIVES[:9]), "pet": dice.choice(NOUNS[-40:]),
             "count": dice.randint(0, 500), "active": dice.random() < 0.5}  # fmt: skip
    for key in dice.sample(sorted(extra), dice.randint(1, 3)):
        fields[key] = extra[key]
        said.append(f"{key} {json.dumps(extra[key], ensure_ascii=False).strip(chr(34))}")
    ask = dice.choice(("Give me a JSON object with {s}.", "JSON: {s}", "Write JSON with {s}.",
                       "As JSON please: {s}", "Return a JSON object with {s}."))  # fmt: skip
    listed = ", ".join(said[:-1]) + f" and {said[-1]}"
    return [user(ask.format(s=listed)), assistant(json.dumps(fields, ensure_ascii=False))]
