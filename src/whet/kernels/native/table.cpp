#include "operators.h"

namespace whet {
namespace WHET_ISA {

extern const Table table;
const Table table = {
#define WHET_ENTRY(name, Args) name,
    WHET_OPERATORS(WHET_ENTRY)
#undef WHET_ENTRY
};

}  // namespace WHET_ISA
}  // namespace whet
