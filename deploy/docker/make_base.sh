#!/usr/bin/env bash
# Make a base image without a registry: a minimal Debian with Python, as a tar archive that every engine imports.
#
#   deploy/docker/make_base.sh            # idempotent; prints the archive's path
#   FORCE=1 deploy/docker/make_base.sh    # from scratch
#
# SUITE    release of Debian or Ubuntu (default: this machine's)
# BASE     where the archive goes       (default .local/docker/base-SUITE-ARCHITECTURE.tar)
#
# Mirror and components are those of this machine's apt. Needs root and debootstrap (apt-get install debootstrap).
# Exit code 3: this machine cannot make it; 1: it failed.
set -euo pipefail
cd "$(dirname "$0")/../.."

PACKAGES=python3,python3-venv,ca-certificates

fail() {
    local code=$1
    printf 'make_base: %s\n' "$2" >&2
    shift 2
    [ $# -eq 0 ] || printf '           %s\n' "$@" >&2
    exit "$code"
}

command -v apt-get >/dev/null || fail 3 "there is no apt-get here" "use the default PYTHON_IMAGE, or run this on Debian"
command -v debootstrap >/dev/null || fail 3 "debootstrap is not installed" "apt-get install debootstrap"
[ "$(id -u)" -eq 0 ] || fail 3 "debootstrap needs root" "run it with sudo"

SUITE=${SUITE:-$(. /etc/os-release && printf '%s' "${VERSION_CODENAME:-}")}
[ -n "$SUITE" ] || fail 3 "/etc/os-release names no release" "set SUITE"
ARCHITECTURE=$(dpkg --print-architecture)
BASE=${BASE:-.local/docker/base-$SUITE-$ARCHITECTURE.tar}
[ -z "${FORCE:-}" ] || rm -f "$BASE"
if [ -e "$BASE" ]; then
    printf '%s\n' "$BASE"
    exit 0
fi

sources=$(apt-get indextargets --format '$(CODENAME) $(REPO_URI) $(COMPONENT)' 'Created-By: Packages' |
    awk -v suite="$SUITE" '$1 == suite')
MIRROR=$(awk 'NR == 1 {print $2}' <<<"$sources")
[ -n "$MIRROR" ] || fail 3 "apt knows no mirror of $SUITE" \
    "run apt-get update, or set SUITE to a release in apt's sources"
COMPONENTS=$(awk -v mirror="$MIRROR" '$2 == mirror {print $3}' <<<"$sources" | sort -u | paste -sd,)

mkdir -p "$(dirname "$BASE")"
work=$(mktemp -d)
log="$BASE.log"
trap 'rm -rf "$work"' EXIT
printf 'make_base: %s for %s with %s: one to three minutes\n' "$SUITE" "$ARCHITECTURE" "$PACKAGES" >&2
if ! debootstrap --variant=minbase --components="$COMPONENTS" --include="$PACKAGES" "$SUITE" "$work/root" "$MIRROR" \
    >"$log" 2>&1; then
    tail -n 8 "$log" >&2
    fail 1 "debootstrap failed (whole log: $log)" "is the mirror in apt's sources reachable?"
fi
chroot "$work/root" python3 -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' ||
    fail 3 "$SUITE has no Python 3.11 or newer" "set SUITE to a newer release"
rm -rf "$work"/root/var/cache/apt/* "$work"/root/var/lib/apt/lists/* "$work"/root/var/log/* \
    "$work"/root/usr/share/doc/* "$work"/root/usr/share/man/* "$work"/root/usr/share/locale/*
tar --numeric-owner -C "$work/root" -cf "$BASE.partial" .
mv "$BASE.partial" "$BASE"
printf '%s\n' "$BASE"
