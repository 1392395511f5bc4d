// What this library can do on this machine, as text for people and for quire.info.
#pragma once

#include <string>
#include <string_view>

namespace quire {

/// The instruction set that "generic" kernels run on, e.g. "avx512". Throws Error if QUIRE_ISA names none.
std::string isa_in_use();

/// A line per instruction set, best first: "NAME: in use", or why it is not.
std::string explain_isas();

/// A line per table of a device's kernels: "OPERATION: ROW, ROW, ...", in order of preference. Throws Error for a kind
/// of device that has none.
std::string kernel_tables(std::string_view device);

/// A line per family of specs: "NAME: elements FORMAT, what a scale is and covers".
std::string explain_families();

}  // namespace quire
