#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The main job: builds the layers (once), starts the platform, runs the demo's driver, stops the platform and shows that
# nothing is left on the host. SHARED=moosefs: the layers lie on a MooseFS of the demo's own, mounted through FUSE.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cache="$root/build/demo"
bin="$root/build/dev/bin"
store="$cache/layers"
node=demo

case "${SHARED:-}" in
  "") ;;
  moosefs)
    if [[ -z "${DSEC_DEMO_SHARED_ROOT:-}" ]]; then
      cluster=$(mktemp -d /tmp/dsec-demo-moose.XXXXXX)
      trap 'rm -rf "$cluster"' EXIT
      status=0
      DSEC_DEMO_SHARED_ROOT="$cluster/mnt" "$root/tools/shared_root/moosefs.py" run "$cluster" -- "$0" "$@" || status=$?
      if grep -F "$cluster" /proc/self/mountinfo >&2; then
        echo "run_demo: the mount of MooseFS is left" >&2
        exit 1
      fi
      echo "nothing of MooseFS is left: no process, no mount, no network namespace"
      exit "$status"
    fi
    store="$DSEC_DEMO_SHARED_ROOT/layers"
    echo "layers are on $(stat -f -c %T "$DSEC_DEMO_SHARED_ROOT") at $store"
    ;;
  *)
    echo "run_demo: SHARED is moosefs or empty" >&2
    exit 2
    ;;
esac
state=$(mktemp -d /tmp/dsec-demo.XXXXXX)

# What of this node is on the host: cgroups and mounts (processes live in the cgroups).
host_things() {
  find /sys/fs/cgroup -maxdepth 3 -type d -path "*/dsec-$node/*" 2> /dev/null || true
  grep -F "$state" /proc/self/mountinfo || true
}

layer() { # kind name tree
  if ! "$bin/dsec" layer show "$2" --layers "$store" > /dev/null 2>&1 || [[ "$3.stamp" -nt "$3.built" ]]; then
    "$bin/dsec" layer build --layers "$store" --kind "$1" --name "$2" --from-dir "$3"
    [[ -n "${SHARED:-}" ]] || touch "$3.built"
  fi
}

"$root/tools/demo/build_base.sh" "$cache/base"
"$root/tools/demo/build_toolkit.sh" "$cache/toolkit"
layer base debian:12 "$cache/base"
layer toolkit agent:1 "$cache/toolkit"
for task in "$root"/examples/demo/tasks/*/; do
  name=$(basename "$task")
  "$root/tools/demo/build_workspace.sh" "$name" "$cache/workspaces/$name"
  layer workspace "$name:bug" "$cache/workspaces/$name"
done

cat > "$state/node.toml" << CONFIG
node_id = "$node"
listen = "127.0.0.1:0"
state_dir = "$state/state"
run_dir = "$state/run"
layers_dir = "$store"
CONFIG
daemon=
finish() {
  status=$?
  if [[ -n "$daemon" ]]; then
    kill "$daemon" 2> /dev/null || true
    wait "$daemon" 2> /dev/null || true
    if purged=$("$bin/dsec" purge --config "$state/node.toml"); then
      echo "purge removed $(grep -c . <<< "$purged") things that were kept ready"
    else
      printf '%s\n' "$purged" >&2
      status=1
    fi
    left=$(host_things)
    if [[ -n "$left" ]]; then
      printf 'left on the host:\n%s\n' "$left" >&2
      status=1
    else
      echo "nothing of the demo is left on the host: no cgroup, no process, no mount"
    fi
  fi
  if [[ $status -ne 0 && -f "$state/log" ]]; then
    tail -n 20 "$state/log" >&2
  fi
  rm -rf "$state"
  exit "$status"
}
trap finish EXIT

mkfifo "$state/ready"
"$bin/dsec" up --config "$state/node.toml" > "$state/ready" 2> "$state/log" &
daemon=$!
exec 3< "$state/ready"
if ! read -r -t 60 line <&3; then
  echo "run_demo: the platform did not start" >&2
  exit 1
fi
url=$(grep -oE 'http://[0-9.:]+' <<< "$line")
echo "platform is up at $url"
DSEC_URL="$url" DSEC_API_KEY="$(cat "$state/state/api_key")" PYTHONPATH="$root/sdk/python" PYTHONDONTWRITEBYTECODE=1 \
  /usr/bin/python3 "$root/examples/demo/run.py" "$@"
