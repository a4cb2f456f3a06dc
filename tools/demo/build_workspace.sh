#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes the tree of one workspace layer: a project's unmodified Debian source at /workspace/NAME, with our one-bug patch.
#   tools/demo/build_workspace.sh NAME OUT_DIR [MIRROR]
set -euo pipefail

name=${1:?usage: build_workspace.sh NAME OUT_DIR [MIRROR]}
out=${2:?usage: build_workspace.sh NAME OUT_DIR [MIRROR]}
mirror=${3:-http://deb.debian.org/debian}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
task="$here/../../examples/demo/tasks/$name"
stamp="$out.stamp"

if [[ ! -f "$task/task.json" ]]; then
  echo "build_workspace: no task $name ($task/task.json)" >&2
  exit 1
fi
version=$(cat "${BASH_SOURCE[0]}" "$task/task.json" "$task/bug.patch" | sha256sum | cut -d' ' -f1)
if [[ -d "$out" && -f "$stamp" && "$(cat "$stamp")" == "$version" ]]; then
  exit 0
fi
field() { python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["source"][sys.argv[2]])' "$task/task.json" "$1"; }
path=$(field path)
expected=$(field sha256)
mkdir -p "$(dirname "$out")"
work=$(mktemp -d "$out.tmp.XXXXXX")
trap 'rm -rf "$work"' EXIT

archive="$work/source"
if ! curl -sSf --retry 3 -o "$archive" "$mirror/$path"; then
  echo "build_workspace: cannot fetch $mirror/$path" >&2
  exit 1
fi
actual=$(sha256sum "$archive" | cut -d' ' -f1)
if [[ "$actual" != "$expected" ]]; then
  echo "build_workspace: ${path##*/}: expected sha256 $expected, got $actual" >&2
  exit 1
fi
tree="$work/tree"
install -d -m 755 "$tree" "$tree/workspace" "$tree/workspace/$name"
tar -xf "$archive" --strip-components=1 --no-same-owner -C "$tree/workspace/$name"
patch -s --no-backup-if-mismatch -p1 -d "$tree/workspace/$name" < "$task/bug.patch"
# As an installed project would have it; what is not for this Python stays source.
/usr/bin/python3 -m compileall -q -q -s "$tree" -p / "$tree/workspace/$name" ||
  echo "build_workspace: some files of $name do not compile and stay as they are"

rm -rf "$out"
mv "$tree" "$out"
echo "$version" > "$stamp"
