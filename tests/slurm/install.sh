#!/usr/bin/env bash
# Install Slurm and munge from Debian's or Ubuntu's packages, where they are missing. The tests start daemons of their
# own with files of their own: nothing need be set up.
set -euo pipefail

# As root's, whatever the caller's is: daemons lie in sbin.
PATH=$PATH:/usr/local/sbin:/usr/sbin

missing=()
for command in munged slurmctld slurmd sbatch srun; do
    command -v "$command" >/dev/null || missing+=("$command")
done
[[ ${#missing[@]} -gt 0 ]] || exit 0

if [[ $(id -u) -ne 0 ]] || ! command -v apt-get >/dev/null; then
    echo "make test-slurm: ${missing[*]} not found. Install Slurm and munge, or run this as root on Debian or Ubuntu." >&2
    exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends slurm-wlm munge >/dev/null
