"""What is known of the machine."""

import os

from raygpt import host


def test_memory_is_the_machines_or_what_a_container_may_take(tmp_path, monkeypatch):
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(host, "MEMORY_LIMITS", (str(tmp_path / "no such file"), str(limit)))
    for text, memory in (("max\n", machine), (f"{2**30}\n", 2**30), (f"{2**63}\n", machine)):
        limit.write_text(text)
        assert host.host_memory() == memory
