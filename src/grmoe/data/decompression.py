"""Compressed files as streams. Memory is bounded whatever a file holds: a few kilobytes may unpack to gigabytes."""

from __future__ import annotations

import gzip
import io
import lzma
import math
import zlib
from collections.abc import Iterator
from typing import IO, Any

from grmoe.data.sources import optional

BUFFER = 2**20
_XZ_MEMORY = 2**28  # bytes: `xz -9` needs 65 MB, but a file may ask for 4 GB
_ZSTD_WINDOW = 2**27  # bytes: what `zstd` itself accepts without --long
_ZSTD_INPUT = 2**10  # bytes: a block of four bytes unpacks to 128 KiB, so this becomes at most 32 MiB at once
DAMAGE = (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile)  # what a damaged file raises


def decompress(raw: io.BufferedReader, name: str) -> io.BufferedReader:
    """The content of a file, unpacked while it is read. The ending of `name` says how it is compressed."""
    name = name.lower()
    if name.endswith(".gz"):
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), buffer_size=BUFFER)
    if name.endswith(".xz"):
        return io.BufferedReader(_Xz(raw), buffer_size=BUFFER)
    if name.endswith(".zst"):
        return io.BufferedReader(_Zstd(raw), buffer_size=BUFFER)
    return raw


class TooMuch(Exception):
    """Lines that are too long or blank unpack to more than anyone waits for."""


def read_lines(stream: io.BufferedReader, limit: int, patience: float = math.inf) -> Iterator[bytes | None]:
    """The lines of a stream. None stands for a line of more than `limit` bytes, which is never in memory as a whole.

    Blank lines come several at once: a few kilobytes of .zst may unpack to hundreds of millions of them.

    patience: bytes of lines that are too long or blank. Raises `TooMuch` if they have more.
    """
    while line := stream.readline(limit + 1):
        if len(line) <= limit or (len(line) == limit + 1 and line.endswith(b"\n")):
            if line.isspace():
                ahead = stream.peek()
                indent = len(ahead) - len(ahead.lstrip())
                line += stream.read(ahead.rfind(b"\n", 0, indent) + 1)
                patience -= len(line)
                if patience < 0:
                    raise TooMuch
            yield line
            continue
        while not line.endswith(b"\n") and (line := stream.readline(BUFFER)):
            patience -= len(line)
            if patience < 0:
                raise TooMuch
        yield None


class _Xz(io.RawIOBase):
    """An .xz file of one or more streams. Unlike `lzma.LZMAFile` it has a limit on memory."""

    def __init__(self, raw: IO[bytes]) -> None:
        self.raw = raw
        self.decoder = lzma.LZMADecompressor(memlimit=_XZ_MEMORY)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            data = b""
            if self.decoder.eof:
                data = (self.decoder.unused_data or self.raw.read(BUFFER)).lstrip(b"\0")  # padding of streams
                if not data:
                    return 0
                self.decoder = lzma.LZMADecompressor(memlimit=_XZ_MEMORY)
            elif self.decoder.needs_input:
                data = self.raw.read(BUFFER)
                if not data:
                    raise EOFError("it ends inside a compressed stream")
            try:
                found = self.decoder.decompress(data, max_length=len(buffer))
            except lzma.LZMAError as error:
                if "limit" in str(error):
                    raise lzma.LZMAError(f"it needs more than {_XZ_MEMORY >> 20} MiB to unpack") from error
                raise
            if found:
                buffer[: len(found)] = found
                return len(found)


class _Zstd(io.RawIOBase):
    """A .zst file of one or more frames. zstandard's own reader does not notice that a file was cut off."""

    def __init__(self, raw: IO[bytes]) -> None:
        self.zstandard = optional("zstandard")
        self.raw, self.ready = raw, memoryview(b"")
        self.frame: Any = None  # the frame that is being read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            compressed = self.raw.read(_ZSTD_INPUT)
            if not compressed:
                if self.frame is not None:
                    raise EOFError("it ends inside a compressed frame")
                return 0
            self.ready = memoryview(self._decompress(compressed))
        count = min(len(buffer), len(self.ready))
        buffer[:count], self.ready = self.ready[:count], self.ready[count:]
        return count

    def _decompress(self, compressed: bytes) -> bytes:
        parts = []
        while compressed:
            if self.frame is None:
                decoder = self.zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
                self.frame = decoder.decompressobj()
            try:
                parts.append(self.frame.decompress(compressed))
            except self.zstandard.ZstdError as error:
                if "too much memory" in str(error):
                    mebibytes = _ZSTD_WINDOW >> 20
                    raise EOFError(f"it needs more than {mebibytes} MiB to unpack (zstd --long)") from error
                raise EOFError(str(error).removeprefix("zstd decompressor error: ")) from error
            if not self.frame.eof:
                break
            compressed, self.frame = self.frame.unused_data, None
        return b"".join(parts)
