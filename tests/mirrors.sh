# shellcheck shell=bash
# mirror LABEL DEFAULT: where this machine's apt takes the archive of that label from; else the default.
mirror() {
  local found
  # shellcheck disable=SC2016 # apt's own variables
  found=$(apt-get indextargets --format '$(LABEL)|$(REPO_URI)' 2>/dev/null |
    awk -F '|' -v label="$1" '$1 == label && !seen++ {print $2}') || true
  printf '%s\n' "${found:-$2}"
}
