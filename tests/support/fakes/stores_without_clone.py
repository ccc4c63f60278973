"""torch's stores as before its release 2.8, which have no `clone`."""

from __future__ import annotations

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore


def remove_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove `clone` from all classes of stores."""
    for kind in (Store, TCPStore, PrefixStore, FileStore, HashStore):
        if "clone" in vars(kind):
            monkeypatch.delattr(kind, "clone")
