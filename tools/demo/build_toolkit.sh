#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes the tree of the demo's toolkit layer: pytest from Debian's packages and the scripted agent. The tree holds only
# those files; it merges over the base.
#   tools/demo/build_toolkit.sh OUT_DIR
set -euo pipefail

out=${1:?usage: build_toolkit.sh OUT_DIR}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
agent="$here/../../examples/demo/agent"
stamp="$out.stamp"
packages=(python3-pytest python3-attr python3-iniconfig python3-packaging python3-pluggy python3-idna)
version=$(cat "${BASH_SOURCE[0]}" "$agent"/*.py | sha256sum | cut -d' ' -f1)

if [[ -d "$out" && -f "$stamp" && "$(cat "$stamp")" == "$version" ]]; then
  exit 0
fi
mkdir -p "$(dirname "$out")"
work=$(mktemp -d "$out.tmp.XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir "$work/debs" "$work/tree"
chmod 755 "$work/tree"

echo "build_toolkit: downloading ${packages[*]}"
if ! (cd "$work/debs" && apt-get download -qq -o APT::Sandbox::User=root "${packages[@]}"); then
  echo "build_toolkit: cannot download from the configured archive" >&2
  exit 1
fi
for deb in "$work"/debs/*.deb; do
  dpkg-deb -x "$deb" "$work/tree"
done
rm -rf "$work/tree/usr/share/doc" "$work/tree/usr/share/man" "$work/tree/usr/share/lintian"
# The packages run py3compile when they are installed; done here so that sandboxes need not.
python3 -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2> /dev/null && interpreter=python3 || interpreter=/usr/bin/python3
"$interpreter" -m compileall -q -s "$work/tree" -p / "$work/tree/usr/lib/python3/dist-packages"
install -d -m 755 "$work/tree/opt/dsec-agent"
install -m 755 "$agent/agent.py" "$agent/judge.py" "$work/tree/opt/dsec-agent/"

rm -rf "$out"
mv "$work/tree" "$out"
echo "$version" > "$stamp"
