"""The CRC that is computed from a difference is the one that reading the whole file gives."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from rollback.disk.content import crc32_after


@given(content=st.binary(min_size=1, max_size=3000), data=st.data())
def test_crc_of_the_patched_file_without_reading_it(content: bytes, data: st.DataObject) -> None:
    patched, crc = content, zlib.crc32(content)
    for _ in range(data.draw(st.integers(1, 3))):
        offset = data.draw(st.integers(0, len(content) - 1))
        new = data.draw(st.binary(min_size=1, max_size=len(content) - offset))
        old = patched[offset : offset + len(new)]
        crc = crc32_after(crc, len(content), [(offset, old, new)])
        patched = patched[:offset] + new + patched[offset + len(new) :]
    assert crc == zlib.crc32(patched)
