#include "quire/info/info.h"

#include <algorithm>
#include <cctype>

#include "quire/cpu/isa.h"
#include "quire/device/device.h"

namespace quire {
namespace {

std::string capitals(std::string_view name) {
  std::string out(name);
  for (char& c : out) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return out;
}

std::string scale_of(const FamilyRow& row) {
  const std::string kinds[] = {"a float32", "an E8M0", "an " + capitals(quire::row(kBlockScaleFormat).name)};
  const std::string scope = row.scope == Scope::tensor ? "the tensor"
                            : row.scope == Scope::row  ? "a row"
                                                       : text(row.block, " elements");
  return text(kinds[static_cast<size_t>(row.scale)], " scale for ", scope,
              row.scale == ScaleKind::two_level ? " under a float32 amax" : "");
}

template <class... Problems>
struct Tables {
  static std::string text_of(const Device& device) {
    std::string out;
    const auto add = [&](std::string_view op, const std::string& rows) {
      if (!rows.empty()) out += text(op, ": ", rows, "\n");
    };
    (add(Problems::kOp, row_names(std::get<KernelRows<Problems>>(device.kernels))), ...);
    return out;
  }
};

}  // namespace

std::string isa_in_use() { return std::string(cpu::active().name); }

std::string explain_isas() {
  const std::string in_use = isa_in_use();
  const cpu::Isa& best = *std::find_if(cpu::all().begin(), cpu::all().end(), [](auto& isa) { return isa.supported(); });
  std::string out;
  for (const cpu::Isa& isa : cpu::all()) {
    const std::string missing = isa.missing();
    const std::string reason = !missing.empty()      ? "this machine lacks " + missing
                               : best.name == in_use ? text(in_use, " comes first")
                                                     : "QUIRE_ISA names another";
    out += text(isa.name, ": ", isa.name == in_use ? "in use" : reason, "\n");
  }
  return out;
}

std::string kernel_tables(std::string_view device) {
  const Device* const found = find_device(device);
  check(found, "info: quire has no kernels for ", device);
  return ForAllProblems<Tables>::text_of(*found);
}

std::string explain_families() {
  std::string out;
  for (const FamilyRow& row : kFamilies)
    out += text(row.name, ": elements ", quire::row(row.element).name, ", ", scale_of(row), "\n");
  return out;
}

}  // namespace quire
