"""langchain-openai against the server whose address is the first argument."""

import sys

from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

url = sys.argv[1] + "/v1"
common = {"model": "tiny", "base_url": url, "api_key": "none", "max_retries": 0}
chat = ChatOpenAI(**common, temperature=0, max_tokens=64)

answer = chat.invoke("What is 2 + 2? Answer briefly.")
assert "4" in answer.content, answer
assert answer.usage_metadata["output_tokens"] > 0, answer

pieces = list(chat.stream("What is 2 + 2? Answer briefly."))
assert "".join(p.content for p in pieces) == answer.content, pieces


class Sum(BaseModel):
    """Adds."""

    total: int


shaped = chat.with_structured_output(Sum, method="json_schema").invoke("What is 2 + 2?")
assert isinstance(shaped, Sum), shaped

called = chat.bind_tools([Sum], tool_choice="required", strict=None).invoke("Add 2 and 2.")
assert called.tool_calls, called
assert called.tool_calls[0]["name"] == "Sum", called

talk = ChatOpenAI(**common, use_responses_api=True, temperature=0, max_tokens=64).invoke("Hello")
assert talk.text, talk

plain = OpenAI(**common, temperature=0, max_tokens=8)
assert isinstance(plain.invoke("one two three"), str)
print("ok")
