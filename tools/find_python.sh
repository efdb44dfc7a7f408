#!/bin/sh
# Prints the path of the first working CPython among the versions given, newest first: tools/find_python.sh 3.13 3.12 3.11
#
# For each version it looks on PATH, then in pyenv's versions folder. A candidate counts only if it runs, is that version and
# can make a virtual environment: pyenv's shims fail when their version is not selected, Debian's python3 may lack ensurepip.
set -u

works() { # COMMAND VERSION: prints the interpreter's own path
    "$1" -c '
import sys, sysconfig
import ctypes, ensurepip, ssl, venv, zlib
right = sys.implementation.name == "cpython" and "%d.%d" % sys.version_info[:2] == sys.argv[1]
if not right or sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit(1)
print(sys.executable)' "$2" 2>/dev/null </dev/null
}

on_path() { # NAME: every file of that name on PATH, so that a dead shim does not hide a live interpreter behind it
    old_ifs=$IFS
    IFS=:
    for folder in $PATH; do
        [ -x "${folder:-.}/$1" ] && printf '%s\n' "${folder:-.}/$1"
    done
    IFS=$old_ifs
}

in_pyenv() { # VERSION: pyenv's interpreters of that version, newest patch first
    versions="${PYENV_ROOT:-${HOME:-}/.pyenv}/versions"
    [ -d "$versions" ] || return 0
    (cd "$versions" && ls -d "$1".* 2>/dev/null) | sort -t . -k 3,3nr | while read -r name; do
        printf '%s\n' "$versions/$name/bin/python"
    done
}

for version in "$@"; do
    candidates=$(on_path "python$version"; on_path python3; on_path python; in_pyenv "$version")
    while IFS= read -r candidate; do
        [ -n "$candidate" ] && works "$candidate" "$version" && exit 0
    done <<EOF
$candidates
EOF
done

echo "No working Python $* found on PATH or among pyenv's versions (it needs ssl and ensurepip; on Debian: python3-venv)." >&2
exit 1
