#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes the root tree of the base layer `fn-languages:1`: Debian 12 with the compilers and interpreters of the seven
# languages of FnCall, and what makes them start fast.
#   tools/fn/build_languages.sh OUT_DIR [MIRROR]
# Idempotent: a tree made by these very files is left as it is, without any network. Packages are kept in OUT_DIR.packages,
# so that a change of this script downloads nothing again.
set -euo pipefail

out=${1:?usage: build_languages.sh OUT_DIR [MIRROR]}
mirror=${2:-http://deb.debian.org/debian}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
packages=gcc,g++,python3,golang-go,openjdk-17-jdk-headless,nodejs,procps
stamp="$out.stamp"
version=$(cat "${BASH_SOURCE[0]}" "$here/JavaBuild.java" | sha256sum | cut -d' ' -f1)

if [[ -d "$out" && -f "$stamp" && "$(cat "$stamp")" == "$version" ]]; then
  exit 0
fi
if [[ "$(id -u)" -ne 0 ]]; then
  echo "build_languages: must run as root (debootstrap makes device nodes and owners)" >&2
  exit 1
fi
mkdir -p "$(dirname "$out")" "$out.packages"
work=$(mktemp -d "$out.tmp.XXXXXX")
trap 'rm -rf --one-file-system "$work" "$work.log"' EXIT

echo "build_languages: debootstrap from $mirror"
if ! debootstrap --variant=minbase --cache-dir="$(realpath "$out.packages")" --include="$packages" bookworm "$work" "$mirror" \
  > "$work.log" 2>&1; then
  tail -n 20 "$work.log" >&2
  echo "build_languages: debootstrap failed" >&2
  exit 1
fi

# Inside, with a /proc of its own that goes with the namespace (the JVM finds itself by it).
install -D -m 644 "$here/JavaBuild.java" "$work/usr/lib/dsec/JavaBuild.java"
echo "build_languages: prewarming"
unshare --mount --pid --fork --propagation private bash -euo pipefail -c '
  mount -t proc proc "$1/proc"
  exec chroot "$1" /usr/bin/env -i PATH=/usr/bin:/bin HOME=/tmp LANG=C.UTF-8 bash -euo pipefail -s' _ "$work" << 'INSIDE'
# Headers that nearly every C++ solution includes, for the flags of share/fn_types/cpp.json. Other flags read the text.
header=$(echo '#include <bits/stdc++.h>' | g++ -x c++ -M - | grep -o '/[^ ]*/bits/stdc++\.h')
g++ -O2 -std=gnu++20 -pthread -x c++-header "$header" -o "$header.gch"

# The Java compiler with names of files left aside, and its classes as they are in memory.
cd /usr/lib/dsec
javac -d classes JavaBuild.java
printf 'Main-Class: JavaBuild\n' > manifest
jar --create --file java-build.jar --manifest manifest -C classes .
rm -r classes manifest JavaBuild.java
mkdir /tmp/warm && cd /tmp/warm
cat > warm.java << 'JAVA'
import java.util.*;
import java.util.stream.*;
public class Warm {
  record Point(int x, int y) {}
  interface Shape { double area(); }
  enum Kind { A, B }
  static <T extends Comparable<T>> T best(List<T> items) { return Collections.max(items); }
  public static void main(String[] args) throws Exception {
    Scanner in = new Scanner(System.in);
    Map<String, List<Integer>> map = new TreeMap<>();
    for (int i = 0; i < 3; i++) map.computeIfAbsent("k" + i, key -> new ArrayList<>()).add(i);
    Shape shape = () -> 1.5;
    String text = switch (Kind.A) { case A -> "a"; case B -> "b"; };
    System.out.println(map.values().stream().flatMap(List::stream).map(x -> x * 2).collect(Collectors.toList()) + text);
    System.out.printf("%d %.2f %s%n", best(List.of(1, 2)), shape.area(), new Point(1, 2));
    try (in) { if (in.hasNextInt()) throw new IllegalStateException(); }
  }
}
JAVA
java -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:ArchiveClassesAtExit=/usr/lib/dsec/java-build.jsa \
  -jar /usr/lib/dsec/java-build.jar warm.java 2> /tmp/archive.log || { cat /tmp/archive.log >&2; exit 1; }
[[ "$(java -jar main.jar < /dev/null)" == "[0, 2, 4]a"* ]]
INSIDE

# What differs from build to build, is only of use while installing, or is of no use to a call.
rm -rf "$work"/var/cache/apt/* "$work"/var/lib/apt/lists/* "$work"/var/log/* "$work"/var/cache/ldconfig/aux-cache \
  "$work"/debootstrap "$work"/tmp/* "$work"/run/*
rm -rf "$work"/usr/share/doc/* "$work"/usr/share/man/* "$work"/usr/share/locale/* "$work"/usr/share/go-1.19/test \
  "$work"/usr/share/go-1.19/api "$work"/usr/lib/jvm/*/jmods
rm -rf "$work"/dev/* "$work"/etc/hostname "$work"/etc/resolv.conf "$work"/etc/machine-id
chmod 1777 "$work/tmp"
chmod 755 "$work"

rm -rf --one-file-system "$out"
mv "$work" "$out"
trap 'rm -f "$work.log"' EXIT
echo "$version" > "$stamp"
