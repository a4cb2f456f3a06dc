#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs every Debian 12 package that building, testing and the demo need. Idempotent; no network when all are there.
set -euo pipefail

packages=(
  # build
  clang-19 clang-tidy-19 clang-format-19 lld-19 libclang-rt-19-dev llvm-19 cmake ninja-build ccache make git
  libboost1.81-dev libexpected-dev libtomlplusplus-dev nlohmann-json3-dev libcli11-dev libspdlog-dev libfmt-dev
  protobuf-compiler libprotobuf-dev libsqlite3-dev libarchive-dev libxxhash-dev liblz4-dev libzstd-dev libssl-dev libseccomp-dev
  libcurl4-openssl-dev
  # layers and scratch space
  erofs-utils btrfs-progs e2fsprogs mount skopeo attr libcap2-bin
  # virtual machines and their disks
  qemu-system-x86 qemu-system-data qemu-utils
  # tests and benchmarks
  libgtest-dev libgmock-dev librapidcheck-dev libbenchmark-dev containerd runc bubblewrap docker-registry g++
  moosefs-master moosefs-chunkserver moosefs-client etcd-server iproute2
  python3 python3-httpx python3-pytest python3-pytest-timeout python3-yaml python3-jsonschema python3-pip python3-venv
  # demo
  debootstrap dpkg-dev xz-utils ca-certificates curl
)

if [[ "$(id -u)" -ne 0 ]]; then
  echo "install_deps: must run as root" >&2
  exit 1
fi
missing=()
for package in "${packages[@]}"; do
  if [[ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)" != installed ]]; then
    missing+=("$package")
  fi
done
if [[ ${#missing[@]} -eq 0 ]]; then
  exit 0
fi
echo "install_deps: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
# Tests start what they need by themselves: no package may start a service (invoke-rc.d(8), exit status 101).
policy=/usr/sbin/policy-rc.d
if [[ ! -e "$policy" ]]; then
  trap 'rm -f "$policy"' EXIT
  printf '#!/bin/sh\nexit 101\n' > "$policy"
  chmod 755 "$policy"
fi
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}"
