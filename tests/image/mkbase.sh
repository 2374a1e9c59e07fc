#!/usr/bin/env bash
# mkbase.sh NAME: makes two images in the Docker Engine that DOCKER_HOST names, out of Debian's archive:
#   NAME:base   a plain Debian 12 root, as debian:12-slim is
#   NAME:build  the same for the build stages, with this machine's own certificates, pip settings and wheel folder
# Nothing of the second may reach a built image; tests/image looks.
set -euo pipefail

name=${1:?usage: mkbase.sh NAME}
suite=bookworm
work=$(mktemp -d "${TMPDIR:-/var/tmp}/hearth-mkbase.XXXXXX")
trap 'rm -rf "$work"' EXIT
command -v mmdebstrap >/dev/null || {
  echo "mkbase.sh: no mmdebstrap (apt-get install mmdebstrap)" >&2
  exit 79
}

# shellcheck source=tests/mirrors.sh
source "$(dirname "$0")/../mirrors.sh"
main=$(mirror Debian http://deb.debian.org/debian)
security=$(mirror Debian-Security http://deb.debian.org/debian-security)
mmdebstrap --quiet --variant=minbase --mode=root --include=ca-certificates \
  --aptopt='Acquire::Languages "none"' \
  --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
  "$suite" "$work/root.tar" \
  "deb $main $suite main" \
  "deb $main $suite-updates main" \
  "deb $security $suite-security main"
docker import --change 'CMD ["bash"]' "$work/root.tar" "$name:base" >/dev/null

mkdir -p "$work/build/certificates" "$work/build/wheels"
cp /usr/local/share/ca-certificates/*.crt "$work/build/certificates/" 2>/dev/null || true
links=$(python3 -m pip config get global.find-links 2>/dev/null || true)
for folder in ${PIP_FIND_LINKS:-$links}; do
  [ -d "$folder" ] && cp "$folder"/torch-*.whl "$work/build/wheels/" 2>/dev/null || true
done
cat >"$work/build/pip.conf" <<'EOF'
[global]
cert = /etc/ssl/certs/ca-certificates.crt
find-links = /wheels
timeout = 180
EOF
cat >"$work/build/Dockerfile" <<EOF
FROM $name:base
COPY certificates/ /usr/local/share/ca-certificates/
COPY pip.conf /etc/pip.conf
COPY wheels/ /wheels/
RUN update-ca-certificates
EOF
DOCKER_BUILDKIT=0 docker build --quiet --tag "$name:build" "$work/build" >/dev/null
docker image ls --format '{{.Repository}}:{{.Tag}} {{.Size}}' "$name"
