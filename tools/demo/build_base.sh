#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes the root tree of the demo's base layer: Debian 12 minbase with python3 and patch.
#   tools/demo/build_base.sh OUT_DIR [MIRROR]
# Idempotent: a tree made by this very script is left as it is, without any network.
set -euo pipefail

out=${1:?usage: build_base.sh OUT_DIR [MIRROR]}
mirror=${2:-http://deb.debian.org/debian}
stamp="$out.stamp"
version=$(sha256sum "${BASH_SOURCE[0]}" | cut -d' ' -f1)

if [[ -d "$out" && -f "$stamp" && "$(cat "$stamp")" == "$version" ]]; then
  exit 0
fi
if [[ "$(id -u)" -ne 0 ]]; then
  echo "build_base: must run as root (debootstrap makes device nodes and owners)" >&2
  exit 1
fi
mkdir -p "$(dirname "$out")"
work=$(mktemp -d "$out.tmp.XXXXXX")
trap 'rm -rf --one-file-system "$work"' EXIT

echo "build_base: debootstrap from $mirror"
if ! debootstrap --variant=minbase --include=python3,patch,procps bookworm "$work" "$mirror" > "$work.log" 2>&1; then
  tail -n 20 "$work.log" >&2
  echo "build_base: debootstrap failed" >&2
  exit 1
fi
rm -f "$work.log"

# What differs from build to build or is only of use while installing.
rm -rf "$work"/var/cache/apt/* "$work"/var/lib/apt/lists/* "$work"/var/log/* "$work"/var/cache/ldconfig/aux-cache \
  "$work"/debootstrap "$work"/tmp/* "$work"/run/*
rm -rf "$work"/usr/share/doc/* "$work"/usr/share/man/* "$work"/usr/share/locale/*
rm -rf "$work"/dev/* "$work"/etc/hostname "$work"/etc/resolv.conf "$work"/etc/machine-id
chmod 1777 "$work/tmp"
chmod 755 "$work"

rm -rf --one-file-system "$out"
mv "$work" "$out"
trap - EXIT
echo "$version" > "$stamp"
