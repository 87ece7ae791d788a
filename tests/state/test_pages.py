from __future__ import annotations

import pytest

from millpond.errors import Exhausted, LeaseError
from millpond.state.pages import PageHandle, PagePool


def test_pages_are_taken_all_or_none() -> None:
    pages = PagePool(3)
    with pytest.raises(Exhausted):
        pages.take(4)
    assert pages.num_free == 3
    assert len(pages.take(3)) == 3
    assert pages.take(0) == []


def test_a_page_is_free_after_its_last_reference() -> None:
    pages = PagePool(2)
    taken = pages.take(2)
    pages.retain(taken)
    pages.release(taken)
    assert pages.num_free == 0
    pages.release(taken[:1])
    assert (pages.num_free, pages.drain_freed()) == (1, (taken[0].id,))
    assert pages.drain_freed() == ()


def test_a_stale_handle_raises_even_when_the_page_is_in_use_again() -> None:
    pages = PagePool(1)
    (old,) = pages.take(1)
    pages.release([old])
    (new,) = pages.take(1)
    assert new.id == old.id
    for verb in (pages.retain, pages.release):
        with pytest.raises(LeaseError):
            verb([old])
    with pytest.raises(LeaseError):
        pages.references(old)
    assert pages.references(new) == 1


def test_a_call_that_raises_has_changed_nothing() -> None:
    pages = PagePool(3)
    good, also_good = pages.take(2)
    stale = PageHandle(good.id, good.generation + 1)
    for verb in (pages.retain, pages.release):
        with pytest.raises(LeaseError):
            verb([good, also_good, stale])
    with pytest.raises(LeaseError):
        pages.release([good, also_good, also_good])
    assert [pages.references(handle) for handle in (good, also_good)] == [1, 1]


def test_a_handle_from_outside_the_pool_raises() -> None:
    pages = PagePool(1)
    for page in (-1, 1):
        with pytest.raises(LeaseError):
            pages.retain([PageHandle(page, 0)])  # type: ignore[arg-type]
