#!/usr/bin/env bash
# mkimage.sh NAME: imports a small Debian root with Python and tini as the image NAME:standin into the Docker Engine
# that DOCKER_HOST names. The supervisor in it is a stand-in, mounted by each test.
set -euo pipefail

name=${1:?usage: mkimage.sh NAME}
work=$(mktemp -d "${TMPDIR:-/var/tmp}/hearth-mkimage.XXXXXX")
trap 'rm -rf "$work"' EXIT
command -v mmdebstrap >/dev/null || {
  echo "mkimage.sh: no mmdebstrap (apt-get install mmdebstrap)" >&2
  exit 79
}
# shellcheck source=tests/mirrors.sh
source "$(dirname "$0")/../mirrors.sh"
mmdebstrap --quiet --variant=minbase --mode=root --include=python3,tini --aptopt='Acquire::Languages "none"' \
  --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
  bookworm "$work/root.tar" "deb $(mirror Debian http://deb.debian.org/debian) bookworm main"
docker import --change 'USER 10001:10001' --change 'LABEL io.hearth.sbom=none' \
  --change 'ENTRYPOINT ["/usr/bin/tini", "--", "python3", "/standin/supervisor.py"]' \
  "$work/root.tar" "$name:standin" >/dev/null
