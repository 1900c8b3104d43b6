// The operators of one instruction set, defined in the .cpp files of the subfolders.
#pragma once

#include "args.h"

namespace whet {
namespace WHET_ISA {

#define WHET_DECLARE(name, Args) void name(const Args& a);
WHET_OPERATORS(WHET_DECLARE)
#undef WHET_DECLARE

}  // namespace WHET_ISA
}  // namespace whet
