// Everything the generic algorithms include, so that target files can include it before they open a region.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <span>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "quire/base/float_mode.h"
#include "quire/base/parallel.h"
#include "quire/base/thread_memory.h"
#include "quire/cpu/kernels.h"
#include "quire/format/codec.h"
#include "quire/format/fast.h"
#include "quire/format/half.h"
#include "quire/format/pack.h"
#include "quire/spec/activation.h"
#include "quire/spec/buffers.h"
#include "quire/spec/hadamard.h"
#include "quire/spec/interleave.h"
#include "quire/spec/kinds.h"
#include "quire/spec/pointwise_problem.h"
#include "quire/spec/problem.h"
#include "quire/spec/random.h"
#include "quire/spec/scale.h"
#include "quire/spec/scale_index.h"
#include "quire/spec/swizzle.h"
