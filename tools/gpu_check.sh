#!/bin/bash
# What an NVIDIA GPU says of this commit, as one text: tests of the kernels, then of the operators and layers, then the
# questions that wait for hardware. For a machine that is at hand for minutes: everything is built before.
#
#     QUIRE_TORCH=2.11.0 ./dev test --quick tests/quire_torch/test_refusals.py            here: builds, with tests
#     tools/gpu_check.sh pack build/torch-2.11.0 > build/gpu.tar.gz                       here
#     QUIRE_COMMIT=HASH tools/gpu_check.sh build/gpu.tar.gz > docs/gpu/CARD-DATE.txt      there
#     QUIRE_TORCH=2.13.0 ./dev build                                                      here: back to this PyTorch
#
# 2.11.0 stands for that machine's minor version of PyTorch: a build against PyTorch for CPUs serves its builds with CUDA
# too. Python may be another one, from 3.11 on; its packages numpy, pytest, pytest-xdist, hypothesis, safetensors and tqdm
# are needed. HASH is the commit, where git is not there to say it. On a machine that builds for itself the folder of the
# build takes the place of the archive. Without a driver every part fails for want of one, but "what is installed".
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
if [ "${1:?pack, an archive or the folder of a build}" = pack ]; then
  exec tar -C "${2:?the folder of the build}" --dereference -cz lib golden tests/cuda/test_cuda
fi
if [ -f "$1" ]; then
  build=$(mktemp -d)
  tar -C "$build" -xzf "$1" || exit 1
else
  build=$(cd "$1" && pwd) || exit 1
fi
cd "$root" || exit 1
failed=0

# part TITLE SECONDS COMMAND...: its output, and whether it passed within that time.
part() {
  local title=$1 seconds=$2 begin=$SECONDS
  shift 2
  printf '\n== %s\n' "$title"
  timeout --kill-after=5 "$seconds" "$@" 2>&1
  local status=$?
  [ $status -eq 0 ] || failed=$((failed + 1))
  printf '== %s: %s in %d s\n' "$title" "$([ $status -eq 0 ] && echo passed || echo "FAILED, status $status")" $((SECONDS - begin))
}

printf 'commit %s\ndate %s\n' "${QUIRE_COMMIT:-$(git rev-parse HEAD 2>/dev/null)}" "$(date -u +%F)"
nvidia-smi --query-gpu=name,driver_version,memory.total,compute_cap --format=csv,noheader
python3 -c 'import sys, torch; print("PyTorch", torch.__version__, "Python", sys.version.split()[0])'

ln -sfn "$build/lib" python/quire/lib
# PyTorch's cuBLASLt, also for programs without PyTorch.
cublaslt=$(python3 -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1] / "nvidia/cu13/lib")')
# Cases that want a GPU fail where PyTorch finds none.
export QUIRE_REQUIRE_CUDA=1
export PYTHONPATH=$root/python QUIRE_GOLDEN_DIR=$build/golden LD_LIBRARY_PATH=$build/lib:$cublaslt:${LD_LIBRARY_PATH:-}
of_the_emulator='*Emulator*:*Faults*:*Features*:*Gate*:*Mutations*:*Orders*:*/Tensor*'
kernels=("$build/tests/cuda/test_cuda" --gtest_brief=1 "--gtest_filter=-$of_the_emulator")
part "kernels against the CPU" 90 env QUIRE_CUDA_TESTS=gpu "${kernels[@]}"
part "what is installed" 30 python3 -m quire.info
part "golden vectors of quantizers" 60 python3 -m quire.info --check --device cuda
quick="python3 -m pytest -q -n 8 --tb=short --quick --maxfail=40 --device cuda tests/python tests/quire_torch"
# decode32 has the bound that the tests have; rows that sum by tensor cores have others (docs/numerics.md 7.6).
part "golden vectors, operators and layers, products by decode32" 120 env QUIRE_KERNEL=gemm:decode32 $quick
part "the same, products by the rows that come first" 120 $quick
part "ranks that share the GPU, and NCCL" 60 python3 -m pytest -q --tb=short --device cuda tests/python/distributed/test_ranks_on_a_device.py
for question in tools/gpu_questions/*; do
  case $question in
    *.py) part "question: $(basename "$question")" 60 python3 "$question" ;;
    *.sh) part "question: $(basename "$question")" 60 bash "$question" "$build" ;;
  esac
done
if command -v compute-sanitizer >/dev/null; then
  for check in memcheck racecheck; do
    part "compute-sanitizer $check" 60 env QUIRE_CUDA_TESTS=gpu QUIRE_CUDA_CASES=few compute-sanitizer --tool $check \
      --error-exitcode 9 "${kernels[@]}"
  done
fi
printf '\n%d parts failed\n' "$failed"
exit $((failed > 0))
