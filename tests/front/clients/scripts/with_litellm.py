"""litellm's ways to this server, whose address is the first argument."""

import sys

import litellm

url = sys.argv[1]
HELLO = [{"role": "user", "content": "What is 2 + 2? Answer briefly."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
for model, base in (
    ("openai/tiny", url + "/v1"),
    ("hosted_vllm/tiny", url + "/v1"),
    ("anthropic/tiny", url),
):
    common = {
        "model": model, "api_base": base, "api_key": "none", "messages": HELLO, "temperature": 0,
    }  # fmt: skip
    whole = litellm.completion(**common, max_tokens=64)
    assert whole.choices[0].message.content, (model, whole)
    assert whole.usage.prompt_tokens > 0, (model, whole)
    pieces = list(litellm.completion(**common, max_tokens=64, stream=True))
    assert "".join(p.choices[0].delta.content or "" for p in pieces), (model, pieces)
    forced = litellm.completion(**common, max_tokens=200, tools=[TOOL], tool_choice="required")
    assert forced.choices[0].message.tool_calls[0].function.name == "add", (model, forced)
text = litellm.text_completion(
    model="text-completion-openai/tiny", api_base=url + "/v1", api_key="none", prompt="one two",
    max_tokens=8, temperature=0,
)  # fmt: skip
assert text.choices[0].finish_reason in ("stop", "length"), text
print("ok")
