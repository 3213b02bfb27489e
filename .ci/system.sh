# Functions of .ci/run: what the machine must have. Sourced, never run.

# program:package, for programs that the tests need and Python does not bring
NEEDED=(
  bwrap:bubblewrap dockerd:docker.io busybox:busybox-static mmdebstrap:mmdebstrap
  npm:npm make:make git:git
)

install_missing() {
  local packages=() pair
  export PATH="$PATH:/usr/sbin:/sbin"
  for pair in "${NEEDED[@]}"; do
    command -v "${pair%%:*}" >/dev/null || packages+=("${pair##*:}")
  done
  # A busybox that is not static cannot run in an image of its own.
  if command -v busybox >/dev/null && ldd "$(command -v busybox)" >/dev/null 2>&1; then
    packages+=(busybox-static)
  fi
  [ ${#packages[@]} -eq 0 ] && return
  if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "missing: ${packages[*]}; install them, or run this as root where apt-get is" >&2
    return 1
  fi
  timeout 300 apt-get update -qq
  DEBIAN_FRONTEND=noninteractive timeout 900 \
    apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
}

ENGINE_IS_OURS=no

start_engine() {
  if .venv/bin/python -m clawgym_jax.sandbox.engine status | grep -q '://'; then
    return
  fi
  timeout 120 .venv/bin/python -m clawgym_jax.sandbox.engine start
  ENGINE_IS_OURS=yes
}

stop_engine() {
  if [ "$ENGINE_IS_OURS" = yes ]; then
    timeout 90 .venv/bin/python -m clawgym_jax.sandbox.engine stop || true
  fi
}
