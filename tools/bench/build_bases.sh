#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes the root trees of the benchmarks' base images: Debian 12 with the toolchain of one language each, as large as the
# images that people use for it (documentation and locales stay, as in theirs).
#   tools/bench/build_bases.sh OUT_DIR [MIRROR]
# Trees are OUT_DIR/cpp, go, java, js and python. Idempotent: a tree made by this very script is left as it is, without
# network. Packages are kept in OUT_DIR/packages, so that a change of this script downloads nothing again.
set -euo pipefail

out=${1:?usage: build_bases.sh OUT_DIR [MIRROR]}
mirror=${2:-http://deb.debian.org/debian}
version=$(sha256sum "${BASH_SOURCE[0]}" | cut -d' ' -f1)

common="ca-certificates curl file git less make patch procps unzip xz-utils"
declare -A packages=(
  [cpp]="g++ gcc gdb cmake ninja-build pkg-config autoconf automake libtool libboost-dev libssl-dev zlib1g-dev libeigen3-dev
         libgtest-dev catch2 nlohmann-json3-dev libfmt-dev valgrind"
  [go]="golang golang-golang-x-tools gcc libc6-dev pkg-config"
  [java]="default-jdk-headless maven ant junit4 junit5 libhamcrest-java libmockito-java libcommons-lang3-java libguava-java"
  [js]="nodejs npm mocha node-tape node-typescript webpack python3 g++"
  [python]="python3 python3-dev python3-pip python3-venv python3-setuptools python3-wheel python3-numpy python3-scipy
            python3-pandas python3-matplotlib python3-requests python3-yaml python3-pytest python3-hypothesis gcc g++"
)

base_stamp() { printf '%s %s' "$version" "$1"; }
is_made() { [[ -d "$out/$1" && -f "$out/$1.stamp" && "$(cat "$out/$1.stamp")" == "$(base_stamp "$1")" ]]; }

missing=()
for language in cpp go java js python; do
  is_made "$language" || missing+=("$language")
done
[[ ${#missing[@]} -gt 0 ]] || exit 0
if [[ "$(id -u)" -ne 0 ]]; then
  echo "build_bases: must run as root (debootstrap makes device nodes and owners)" >&2
  exit 1
fi
mkdir -p "$out/packages/apt/partial" "$out/packages/debootstrap"
out=$(realpath "$out")
work=$(mktemp -d "$out/tmp.XXXXXX")
trap 'rm -rf --one-file-system "$work"' EXIT

echo "build_bases: debootstrap from $mirror"
if ! debootstrap --variant=minbase --cache-dir="$out/packages/debootstrap" bookworm "$work/minbase" "$mirror" > "$work/log" 2>&1; then
  tail -n 20 "$work/log" >&2
  exit 1
fi
# No service starts and no unit file is switched on (invoke-rc.d(8), exit status 101); the packages stay outside of the tree.
printf '#!/bin/sh\nexit 101\n' > "$work/minbase/usr/sbin/policy-rc.d"
chmod 755 "$work/minbase/usr/sbin/policy-rc.d"
printf 'deb %s bookworm main\n' "$mirror" > "$work/minbase/etc/apt/sources.list"
printf 'APT::Sandbox::User "root";\nAPT::Install-Recommends "false";\nAcquire::Languages "none";\n' > "$work/minbase/etc/apt/apt.conf.d/00bench"

# A mount namespace of its own holds /proc, /dev and the packages: nothing of them is left when it ends. A command in the
# tree has only its own processes to see.
inside() { # tree command...
  unshare --mount --pid --fork --propagation private bash -euo pipefail -c '
    tree=$1; shift
    mount -t proc proc "$tree/proc"
    mount -t tmpfs none "$tree/run"
    mount -t tmpfs none "$tree/dev" -o mode=755
    for node in null zero full random urandom tty; do touch "$tree/dev/$node"; mount --bind "/dev/$node" "$tree/dev/$node"; done
    mkdir -p "$tree/var/cache/apt/archives"
    mount --bind "$0/apt" "$tree/var/cache/apt/archives"
    if [[ -e /etc/resolv.conf ]]; then touch "$tree/etc/resolv.conf"; mount --bind /etc/resolv.conf "$tree/etc/resolv.conf"; fi
    exec chroot "$tree" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive "$@"
  ' "$out/packages" "$@"
}

inside "$work/minbase" apt-get update -qq
for language in "${missing[@]}"; do
  echo "build_bases: $language"
  tree="$work/$language"
  cp -a "$work/minbase" "$tree"
  # shellcheck disable=SC2086  # lists of words
  if ! inside "$tree" apt-get install -y -qq -o Dpkg::Use-Pty=0 -o Dpkg::Options::=--force-unsafe-io $common ${packages[$language]} \
    > "$work/log" 2>&1; then
    tail -n 30 "$work/log" >&2
    echo "build_bases: $language failed" >&2
    exit 1
  fi
  # What differs from build to build, or belongs to the installing only.
  rm -rf "$tree"/usr/sbin/policy-rc.d "$tree"/etc/apt/apt.conf.d/00bench "$tree"/debootstrap
  find "$tree"/var/cache/apt "$tree"/var/lib/apt/lists "$tree"/var/log "$tree"/var/cache/ldconfig "$tree"/run "$tree"/tmp "$tree"/dev \
    -xdev -mindepth 1 -delete
  rm -f "$tree"/etc/hostname "$tree"/etc/resolv.conf "$tree"/etc/machine-id
  chmod 1777 "$tree/tmp"
  chmod 755 "$tree"
  rm -rf --one-file-system "${out:?}/$language"
  mv "$tree" "$out/$language"
  base_stamp "$language" > "$out/$language.stamp"
done
