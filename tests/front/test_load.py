"""`millpond bench serve`: what it sends, what it measures, and what it says when that fails."""

from __future__ import annotations

import json
import socket
import threading

import pytest

from millpond.errors import Refused
from millpond.front import cli
from millpond.front.flags import BenchFlags, parse
from millpond.front.load.command import body, prompts
from millpond.front.load.drive import Outcome, Pace
from millpond.front.load.report import at_once, quantile, spread, summary
from millpond.front.load.wire import Target
from tests.support.ports import free_port

WORDS = "word " * 400


def flags(*words: str) -> BenchFlags:
    made, notes = parse(BenchFlags, "bench serve", list(words))
    assert notes == []
    return made


def test_times_are_of_the_users_and_not_of_the_machine():
    one = Outcome(due=10.0, arrivals=[10.5, 10.6, 10.8], end=11.0, completion_tokens=7)
    assert one.first == pytest.approx(0.5)
    assert one.gaps == pytest.approx([0.1, 0.2])
    assert one.per_token == pytest.approx(0.05)
    assert one.latency == pytest.approx(1.0)
    single = Outcome(due=1.0, arrivals=[2.0], end=2.0, completion_tokens=1)
    assert (single.gaps, single.per_token) == ([], None)
    failed = Outcome(due=0.0, end=50.0, error="HTTP 503: away")
    made = summary([one, single, failed], 2.0)
    assert (made["requests"], made["failed"]) == (3, 1)
    assert made["errors"] == {"HTTP 503: away": 1}
    assert made["requests_per_second"] == 1.0
    assert made["completion_tokens_per_second"] == 4.0
    assert made["ttft_ms"]["mean"] == 750.0
    assert made["ttft_ms"]["max"] == 1000.0
    assert made["latency_ms"]["p50"] == 1000.0
    assert made["peak_at_once"] == 2


def test_quantiles_lie_between_neighbours():
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([0.0, 1.0], 0.9) == pytest.approx(0.9)
    assert quantile([5.0], 0.99) == 5.0
    assert spread([]) is None


def test_requests_that_touch_are_not_at_once():
    times = [(0.0, 1.0), (1.0, 2.0), (1.5, 3.0)]
    assert at_once([Outcome(due=a, end=b) for a, b in times]) == 2
    assert at_once([]) == 0


def test_an_open_loop_comes_at_its_rate_and_the_same_moments_again():
    delays = Pace(None, rate=50.0, seed=3).delays(2000)
    assert delays == sorted(delays) == Pace(None, rate=50.0, seed=3).delays(2000)
    assert delays[-1] == pytest.approx(40.0, rel=0.1)
    assert Pace(4).delays(3) == [0.0, 0.0, 0.0]


def test_prompts_have_as_much_in_common_as_asked():
    made = prompts(flags("--input-len", "20", "--shared-prefix-len", "15"), 5)
    split = [str(p).split() for p in made]
    assert {len(words) for words in split} == {20}
    assert {tuple(words[:15]) for words in split} == {tuple(split[0][:15])}
    assert len({tuple(words[15:]) for words in split}) == 5
    ids = prompts(flags("--token-ids", "100", "--endpoint", "completions"), 3)
    assert all(len(p) == 128 and all(0 <= t < 100 for t in p) for p in ids)
    for wrong in (["--shared-prefix-len", "128"], ["--token-ids", "100"], ["--dataset", "/absent"]):
        with pytest.raises(Refused):
            prompts(flags(*wrong), 2)


def test_a_file_gives_prompts_and_conversations_again_and_again(tmp_path):
    path = tmp_path / "d.jsonl"
    talk = [{"role": "user", "content": "b"}]
    path.write_text('{"prompt": "a"}\n\n' + json.dumps({"messages": talk}) + "\n")
    asked = flags("--dataset", str(path))
    assert prompts(asked, 3) == ["a", talk, "a"]
    assert body(asked, "m", "a")["messages"] == [{"role": "user", "content": "a"}]
    assert body(asked, "m", talk)["messages"] == talk


@pytest.mark.parametrize("url", ["ftp://x", "http://", ""])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(Refused):
        Target(url)


def test_an_address_may_be_that_of_the_api():
    for url in ("http://h:81/p/v1", "http://h:81/p", "h:81/p/"):
        assert Target(url).url == "http://h:81/p"
    assert Target("https://h").port == 443


@pytest.mark.parametrize(
    "how",
    [
        ["--concurrency", "4"],
        ["--request-rate", "200", "--endpoint", "completions", "--token-ids", "2000"],
    ],
)
def test_a_run_measures_every_request_and_writes_it_down(serve, tmp_path, capsys, how):
    running = serve(WORDS)
    path = tmp_path / "o.json"
    argv = ["bench", "serve", running.url, "--num-prompts", "12", "--output-len", "9"]
    argv += ["--input-len", "7", "--json-path", str(path), *how]
    assert cli.main(argv) == 0
    assert "time to first token" in capsys.readouterr().out
    made = json.loads(path.read_text())
    assert made["model"] == "tiny"
    assert len(made["outcomes"]) == made["summary"]["requests"] == 12
    assert made["summary"]["completion_tokens"] == 12 * 9
    assert all(o["ttft"] <= o["latency"] and o["error"] is None for o in made["outcomes"])
    assert len(running.service.engine.requests) == 13  # one to warm up
    if "--concurrency" in how:
        assert made["summary"]["peak_at_once"] <= 4
    else:
        assert all(len(r.tokens) == 7 for r in running.service.engine.requests)


def test_a_picture_is_drawn(serve, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "o.png"
    argv = ["bench", "serve", serve(WORDS).url, "--num-prompts", "4", "--plot", str(path)]
    assert cli.main(argv) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_requests_that_fail_are_counted_and_make_a_status(serve, capsys):
    running = serve(WORDS)
    argv = ["bench", "serve", running.url, "--num-prompts", "3", "--warmup", "0"]
    assert cli.main([*argv, "--model", "absent"]) == 1
    assert "3 times: HTTP 404: the model 'absent' does not exist" in capsys.readouterr().err
    running.service.engine.fault = "no luck"
    assert cli.main([*argv, "--concurrency", "1"]) == 1
    assert "1 times: no luck" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_one_line(capsys):
    assert cli.main(["bench", "serve", f"http://127.0.0.1:{free_port()}"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_server_that_breaks_off_fails_one_request_and_not_the_run(capsys):
    """A server that answers the first request in part and the others with nonsense."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        parts = [
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\ndata:\r\n",
            b"what?\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\ndata: {wrong}\n\n",
        ]

        def play() -> None:
            for part in parts:
                connection, _ = server.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(part)

        thread = threading.Thread(target=play)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        argv = ["bench", "serve", url, "--model", "m", "--num-prompts", "3", "--warmup", "0"]
        assert cli.main([*argv, "--concurrency", "1"]) == 1
        thread.join()
    err = capsys.readouterr().err
    assert all(words in err for words in ("middle of an answer", "no answer in HTTP/1", "no JSON"))
