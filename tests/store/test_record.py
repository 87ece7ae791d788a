"""Names, manifests, and whole records between memories and a store."""

from __future__ import annotations

import random
import threading
import zlib
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.state.checkpoint import AnchorKind
from millpond.store.file import FileStore
from millpond.store.host import HostStore
from millpond.store.identity import Identity
from millpond.store.jobs import Epoch, Lookup
from millpond.store.record import Manifest, chain, manifest_bytes, pack_tokens, record_root
from tests.store.worlds import PAGE, SLOT, ScriptedStore, World, identity

DICE = random.Random(1)
TOKENS = [DICE.randrange(50) for _ in range(320)]


@pytest.fixture
def world():
    made = World()
    yield made
    made.close()


def manifest(end=128):
    return Manifest(
        namespace="n",
        digest=b"d" * 32,
        generation=b"g" * 8,
        put=3,
        end=end,
        slot_bytes=1 << 40,
        page_bytes=7,
        began=1.5,
        kind=AnchorKind.DECODE,
        sums=tuple(range(end // 64 + 1)),
    )


@pytest.mark.parametrize("end", [64, 128, 6400])
def test_a_manifest_comes_back_as_it_was_and_its_length_is_known_beforehand(end):
    packed = manifest(end).pack()
    assert len(packed) == manifest_bytes(end)
    assert Manifest.unpack(packed, "n", b"d" * 32) == manifest(end)


@given(at=st.integers(0, manifest_bytes(128) - 1), flip=st.integers(1, 255))
def test_a_manifest_with_any_byte_changed_is_none(at, flip):
    packed = bytearray(manifest().pack())
    packed[at] ^= flip
    assert Manifest.unpack(packed, "n", b"d" * 32) is None


def test_a_manifest_cut_short_or_of_another_name_is_none():
    packed = manifest().pack()
    assert all(Manifest.unpack(packed[:n], "n", b"d" * 32) is None for n in range(len(packed)))
    assert Manifest.unpack(packed, "m", b"d" * 32) is None
    assert Manifest.unpack(packed, "n", b"e" * 32) is None


def test_whatever_shapes_the_bytes_shapes_the_namespace():
    other = {"tp_size": 2, "alignment": 128, "chunk_size": 32, "weights_version": 1}
    names = {identity().namespace(0), identity().namespace(1)}
    for field in fields(Identity):
        names.add(identity(**{field.name: other.get(field.name, "another")}).namespace(0))
    assert len(names) == 2 + len(fields(Identity))


def test_salts_keep_chains_apart_and_a_chain_ends_at_whole_pages():
    one, two = record_root(cache_salt="a"), record_root(cache_salt="b")
    packed = pack_tokens(TOKENS)
    assert not set(chain(one, packed, 320)) & set(chain(two, packed, 320))
    assert chain(one, packed, 319) == chain(one, packed, 320)[:4]


def test_a_record_comes_back_byte_for_byte_into_other_slots_and_pages(world):
    assert world.put(TOKENS[:192], 1, [3, 4, 9]).why == ""
    found = world.lookup(TOKENS)
    assert found.record.end == 192
    before = world.bytes_of(1, [3, 4, 9])
    assert world.get(found, 5, [0, 7, 8]).why == ""
    assert world.bytes_of(5, [0, 7, 8]) == before


def test_the_last_pages_alone_are_read_where_the_first_are_there(world):
    world.put(TOKENS[:192], 1, [3, 4, 9])
    before = world.bytes_of(2, [3, 4])
    report = world.get(world.lookup(TOKENS), 5, [8])
    assert report.num_bytes == 96 + 40
    assert world.bytes_of(5, [8]) == world.bytes_of(1, [9])
    assert world.bytes_of(2, [3, 4]) == before


def test_the_deepest_record_on_the_step_between_floor_and_limit_is_found(world):
    for pages in (1, 2, 3, 5):
        world.put(TOKENS[: 64 * pages], 1, range(pages))
    assert world.lookup(TOKENS).record.end == 320
    assert world.lookup(TOKENS, limit=319).record.end == 192
    assert world.lookup(TOKENS, limit=319, step=128).record.end == 128
    assert world.lookup(TOKENS, limit=319, floor=192).why == "absent"
    assert world.lookup(TOKENS[::-1]).why == "absent"


def test_nothing_is_remembered_of_jobs_that_are_over():
    """However often jobs are cancelled, before they begin, while they run or after their end."""
    first, other = World(), World(num_ranks=2)
    tokens = list(range(256))
    for number, one in enumerate((first, other)):
        assert one.put(tokens, 1, [1, 2, 3, 4]).why == ""
        for _ in range(50):
            report = one.lookup(tokens)
            assert not report.why
            one.connector.cancel(report.number)  # late; and the second rank never had it
        gate = threading.Event()
        one.stores[0].before = lambda name, keys, gate=gate: gate.wait(10)
        pending = one.connector.submit(
            Lookup(
                number=0, epoch=one.epoch, root=record_root(cache_salt=""),
                tokens=pack_tokens([9 + number] * 64 * 40), floor=0, limit=64 * 40, step=64,
            )
        )  # fmt: skip
        one.connector.cancel(pending.number)
        gate.set()
        assert one.ended.get(timeout=10)[1].why in ("cancelled", "absent")
        assert [len(rank._wanted) for rank in one.connector._ranks] == [0] * one.connector.num_ranks
        one.close()


@pytest.mark.parametrize("kind", ["file", "host", "scripted"])
def test_every_byte_is_checked_once_each_way_and_damage_is_found_all_the_same(
    kind, tmp_path, monkeypatch
):
    """By the store where that seals what it keeps, else by the rank: never by both, nor by none."""
    checked: list[int] = []
    crc32 = zlib.crc32

    def counted(data, start=0):
        checked.append(memoryview(data).nbytes)
        return crc32(data, start)

    store = {
        "file": lambda: FileStore(tmp_path / "s", 1 << 20),
        "host": lambda: HostStore(1 << 20),
        "scripted": ScriptedStore,
    }[kind]()
    one = World(backends=[store])
    tokens = list(range(256))
    record = SLOT + 4 * PAGE
    monkeypatch.setattr("millpond.store.record.zlib.crc32", counted)  # one module, whoever calls
    assert one.put(tokens, 1, [1, 2, 3, 4]).why == ""
    assert sum(size for size in checked if size in (SLOT, PAGE)) == record
    checked.clear()
    found = one.lookup(tokens)
    assert one.get(found, 2, [5, 6, 7, 8]).why == ""
    assert sum(size for size in checked if size in (SLOT, PAGE)) == record
    assert one.bytes_of(2, [5, 6, 7, 8]) == one.bytes_of(1, [1, 2, 3, 4])
    _damage(store, SLOT)
    assert one.get(found, 3, [9, 10, 11, 0]).why in ("absent", "damaged")
    assert one.lookup(tokens).why == "absent"  # and nobody tries it again
    one.close()


def _damage(store, size: int) -> None:
    """One bit of the only object of so many bytes."""
    if isinstance(store, FileStore):
        for path in store.root.glob("??/*"):
            data = bytearray(path.read_bytes())
            if len(data) > size and data[8 + 4 + 4 : 8 + 4 + 4 + 8] == size.to_bytes(8, "little"):
                data[-1] ^= 1
                path.write_bytes(data)
    elif isinstance(store, HostStore):
        for held in store._objects.values():
            if len(held.data) == size:
                held.data[-1] ^= 1
    else:
        for key, data in list(store.objects.items()):
            if len(data) == size:
                store.objects[key] = data[:-1] + bytes([data[-1] ^ 1])


def test_pages_are_put_once_in_a_generation_and_again_when_the_store_lost_them(world):
    first = world.put(TOKENS[:128], 1, [0, 1])
    second = world.put(TOKENS[:256], 2, [0, 1, 2, 3])
    assert second.num_bytes - first.num_bytes == 2 * 4  # two more checksums in the manifest
    for key in [key for key in world.shelf.objects if "/p/" in key][:1]:
        del world.shelf.objects[key]
    world.put(TOKENS[:320], 3, [0, 1, 2, 3, 4])
    assert world.get(world.lookup(TOKENS), 5, [7, 8, 9, 10, 11]).why == ""


def test_what_is_present_is_not_put_again(world):
    world.put(TOKENS[:128], 1, [0, 1])
    assert world.put(TOKENS[:128], 2, [3, 4]).why == "present"


def test_generations_never_mix(world):
    """Two engines put the same record: whoever's manifest stands, all bytes are that one's."""
    other = World(shelf=world.shelf, seed=77)
    world.put(TOKENS[:128], 1, [0, 1])
    key = next(key for key in world.shelf.objects if "/m/" in key)
    first = world.shelf.objects.pop(key)
    other.put(TOKENS[:128], 1, [0, 1])
    found = world.lookup(TOKENS)
    assert world.get(found, 5, [7, 8]).why == ""
    assert world.bytes_of(5, [7, 8]) == other.bytes_of(1, [0, 1])
    world.shelf.objects[key] = first  # the manifest changes between lookup and get
    assert world.get(found, 4, [9, 10]).why == "absent"
    other.close()


@pytest.mark.parametrize("kind", ["/m/", "/s/", "/p/"])
@pytest.mark.parametrize("harm", ["gone", "short", "long", "bit"])
def test_a_record_that_is_not_whole_is_never_read_and_makes_room_for_another(world, kind, harm):
    world.put(TOKENS[:192], 1, [3, 4, 9])
    found = world.lookup(TOKENS)
    for key in [key for key in world.shelf.objects if kind in key]:
        data = bytearray(world.shelf.objects.pop(key))
        data[len(data) // 2] ^= 1
        changed = {"short": data[:-1], "long": data + b"x", "bit": data}
        if harm != "gone":
            world.shelf.objects[key] = bytes(changed[harm])
    report = world.get(found, 5, [0, 7, 8])
    assert report.why in ("absent", "damaged")
    assert world.lookup(TOKENS).why == "absent"
    assert world.put(TOKENS[:192], 1, [3, 4, 9]).why == ""
    assert world.get(world.lookup(TOKENS), 5, [0, 7, 8]).why == ""
    assert world.bytes_of(5, [0, 7, 8]) == world.bytes_of(1, [3, 4, 9])


def test_a_full_store_gets_no_manifest(world):
    world.stores[0].refuse = lambda key: "/s/" in key
    assert world.put(TOKENS[:128], 1, [0, 1]).why == "full"
    assert not any("/m/" in key for key in world.shelf.objects)


def test_what_began_before_an_epoch_or_in_a_retired_generation_is_not_found(world):
    world.put(TOKENS[:128], 1, [0, 1])
    later = world.epoch.next(2.0)
    assert world.lookup(TOKENS, epoch=later).why == "absent"
    world.put(TOKENS[:128], 1, [0, 1], began=3.0, epoch=later)
    assert world.lookup(TOKENS, epoch=later).record.end == 128
    assert world.lookup(TOKENS, epoch=later.next(0.0)).why == "absent"


def test_two_ranks_are_one_record():
    world = World(num_ranks=2)
    world.put(TOKENS[:128], 1, [0, 1])
    found = world.lookup(TOKENS)
    assert world.get(found, 5, [7, 8]).why == ""
    for rank in (0, 1):
        assert world.bytes_of(5, [7, 8], rank) == world.bytes_of(1, [0, 1], rank)
    key = next(key for key in world.shelf.objects if "/m/" in key)
    del world.shelf.objects[key]
    assert world.lookup(TOKENS).why == "absent"  # one rank alone is none
    assert world.get(found, 4, [9, 10]).why == "absent"
    world.close()


def test_ranks_whose_manifests_are_of_different_puts_are_no_record():
    """One rank lost its part and stored what was computed another time, in one generation."""
    world = World(num_ranks=2)
    world.put(TOKENS[:128], 1, [0, 1])
    second = identity(tp_size=2).namespace(1)
    for key in [key for key in world.shelf.objects if key.startswith(second)]:
        del world.shelf.objects[key]
    world.put(TOKENS[:128], 2, [3, 4])
    assert world.get(world.lookup(TOKENS), 5, [7, 8]).why == "absent"
    world.put(TOKENS[:128], 2, [3, 4])
    assert world.get(world.lookup(TOKENS), 5, [7, 8]).why == ""
    for rank in (0, 1):
        assert world.bytes_of(5, [], rank) == world.bytes_of(2, [], rank)
    world.close()


def test_ranks_of_different_generations_come_together_again():
    world = World(num_ranks=2)
    world.put(TOKENS[:128], 1, [0, 1])
    second = identity(tp_size=2).namespace(1)
    del world.shelf.objects[next(k for k in world.shelf.objects if k.startswith(f"{second}/m/"))]
    world.put(
        TOKENS[:128], 1, [0, 1], epoch=Epoch(namespaces=world.epoch.namespaces)
    )  # by the second rank alone
    assert world.get(world.lookup(TOKENS), 5, [7, 8]).why == "absent"
    world.put(TOKENS[:128], 1, [0, 1])
    assert world.get(world.lookup(TOKENS), 5, [7, 8]).why == ""
    world.close()


@pytest.mark.parametrize(
    "changes",
    [{"layout": "other"}, {"model": "other"}, {"kernels": "other"}, {"alignment": 128}],
)
def test_engines_that_differ_share_a_store_and_see_nothing_of_each_other(world, changes):
    other = World(shelf=world.shelf, who=identity(**changes))
    world.put(TOKENS[:128], 1, [0, 1])
    assert other.lookup(TOKENS).why == "absent"
    other.close()
