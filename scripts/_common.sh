# Shared by scripts/demo and scripts/test; sourced, not run.

say() { printf '==> %s\n' "$*"; }

on_debian() { command -v apt-get >/dev/null && command -v dpkg-query >/dev/null; }

can_be_root() { [ "$(id -u)" = 0 ] || command -v sudo >/dev/null; }

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }

# apt_missing PACKAGE...: those that are not installed.
apt_missing() {
    local package
    for package in "$@"; do
        [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)" = installed ] || echo "$package"
    done
}

# apt_get ARGUMENTS...: quietly, and waiting for apt's locks, which a new machine's own update holds for minutes.
apt_get() {
    local said try
    for try in $(seq 60); do
        said=$(as_root env DEBIAN_FRONTEND=noninteractive LC_ALL=C apt-get -qq -o DPkg::Lock::Timeout=300 "$@" \
            2>&1 >/dev/null) && return
        # The option is for dpkg's lock only; for that of the package lists `update` has to be tried again.
        case $said in *"get lock"* | *"lock directory"*) sleep 5 ;; *) break ;; esac
    done
    echo "$said" >&2
    return 1
}

apt_install() { apt_get install -y --no-install-recommends "$@"; }

apt_update() { apt_get update; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python3.10 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

# make_venv FOLDER: a virtual environment, unless it is there; sets $python to its interpreter.
make_venv() {
    local base
    python=$1/bin/python
    [ -x "$python" ] || python=$1/Scripts/python.exe # Windows
    [ -x "$python" ] && return
    say "creating the virtual environment $1"
    if ! { base=$(find_python) && "$base" -c 'import venv, ensurepip' 2>/dev/null; }; then
        on_debian && can_be_root && apt_update && apt_install python3 python3-venv || true
        base=$(find_python) || { echo "error: Python 3.10 or newer is needed, with its venv module" >&2; exit 1; }
    fi
    "$base" -m venv "$1"
    echo '*' >"$1/.gitignore"
    python=$1/bin/python
    [ -x "$python" ] || python=$1/Scripts/python.exe
}

# install_once VENV WHAT...: pip install, unless the same was done before with the same pyproject.toml.
install_once() {
    local venv=$1 stamp wanted
    shift
    stamp=$venv/.installed-$(printf '%s' "$*" | cksum | cut -d ' ' -f 1)
    wanted="$(cksum <pyproject.toml) $PWD" # another clone's environment would test that clone
    [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return
    say "pip install $*"
    "$python" -m pip install --quiet --disable-pip-version-check "$@" || return
    echo "$wanted" >"$stamp"
}
