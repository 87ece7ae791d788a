"""Staging: knows how a step plan becomes device tensors; their shape is defined in `ops.batch`."""

from __future__ import annotations

from millpond.ops.batch import ForwardBatch, RowSlots

__all__ = ["ForwardBatch", "RowSlots"]
