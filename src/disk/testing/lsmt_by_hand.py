#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""LSMT layers written and read from the published description of the format alone (containerd/overlaybd,
src/overlaybd/lsmt/format_spec.md): the judge of src/disk, with which it shares nothing.

  lsmt_by_hand.py write SPEC.json OUT      {"size", "uuid", "parent", "tag", "entries": [[offset, length, byte or null], ...]} in sectors;
                                           byte n fills each sector with n, its number and the rest of n; null: zeroed
  lsmt_by_hand.py read FILE                what it says, as JSON
  lsmt_by_hand.py flat OUT FILE ...        the disk that layers (oldest first) make, as a raw image
"""
import json
import struct
import sys

MAGIC0 = b"LSMT\0\1\2\0"
MAGIC1 = bytes.fromhex("657E63D29444084CA2D2C8EC4FCFAE8A")
SECTOR = 512


def header(flags, index_offset, index_size, virtual_size, uuid, parent, tag):
    out = MAGIC0 + MAGIC1 + struct.pack("<IIQQQ", 390, flags, index_offset, index_size, virtual_size)
    out += uuid.encode().ljust(37, b"\0") + parent.encode().ljust(37, b"\0") + b"\0\0" + bytes([1, 1])
    out += tag.encode().ljust(256, b"\0")
    assert len(out) == 390
    return out.ljust(4096, b"\0")


def sector(byte, number):
    return (bytes([byte]) + struct.pack("<Q", number)).ljust(SECTOR, bytes([byte]))


def write(spec, path):
    data, index = b"", b""
    for offset, length, byte in spec["entries"]:
        place = (4096 + len(data)) // SECTOR
        low = offset | length << 50
        high = 1 << 55 if byte is None else place
        index += struct.pack("<QQ", low, high)
        if byte is not None:
            data += b"".join(sector(byte, offset + i) for i in range(length))
    index_offset = 4096 + len(data)
    with open(path, "wb") as out:
        out.write(header(1 | 2, 0, 0, spec["size"], spec["uuid"], spec["parent"], spec["tag"]))
        out.write(data + index)
        out.write(b"\0" * (-len(index) % 4096))
        out.write(header(2 | 4 | 32, index_offset, len(spec["entries"]), spec["size"], spec["uuid"], spec["parent"], spec["tag"]))


def read(path):
    with open(path, "rb") as file:
        content = file.read()
    for block in (content[:4096], content[-4096:]):
        assert block[:24] == MAGIC0 + MAGIC1, "magic"
        assert block[24:28] == struct.pack("<I", 390), "size"
        assert block[132:134] == b"\1\1", "version"
        assert block[390:] == bytes(4096 - 390), "padding"
    assert struct.unpack("<I", content[28:32])[0] & 3 == 3, "flags of the header"
    trailer = content[-4096:]
    flags, index_offset, index_size, size = struct.unpack("<IQQQ", trailer[28:56])
    assert flags & 7 == 6, "flags of the trailer"
    text = lambda at, length: trailer[at:at + length].split(b"\0")[0].decode()
    entries, done = [], 0
    for i in range(index_size):
        low, high = struct.unpack("<QQ", content[index_offset + 16 * i:index_offset + 16 * i + 16])
        offset, length = low & (1 << 50) - 1, low >> 50
        place, zeroed, tag = high & (1 << 55) - 1, high >> 55 & 1, high >> 56
        assert length > 0 and offset >= done and (offset + length) * SECTOR <= size and tag == 0, f"entry {i}"
        assert zeroed or (place >= 8 and (place + length) * SECTOR <= index_offset), f"place of entry {i}"
        done = offset + length
        entries.append([offset, length, None if zeroed else place])
    assert index_offset >= 4096 and index_offset + 16 * index_size <= len(content) - 4096, "place of the index"
    return content, {"size": size, "uuid": text(56, 37), "parent": text(93, 37), "tag": text(134, 256), "entries": entries}


def flat(out, paths):
    disk = b""
    for path in paths:
        content, said = read(path)
        disk = bytearray(disk.ljust(said["size"], b"\0"))
        for offset, length, place in said["entries"]:
            got = bytes(length * SECTOR) if place is None else content[place * SECTOR:(place + length) * SECTOR]
            disk[offset * SECTOR:(offset + length) * SECTOR] = got
    with open(out, "wb") as file:
        file.write(disk)


if __name__ == "__main__":
    if sys.argv[1] == "write":
        with open(sys.argv[2]) as spec_file:
            write(json.load(spec_file), sys.argv[3])
    elif sys.argv[1] == "read":
        print(json.dumps(read(sys.argv[2])[1]))
    else:
        flat(sys.argv[2], sys.argv[3:])
