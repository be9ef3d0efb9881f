#include "plan/tma_plan.h"

namespace kvio {

const char* tma_refusal(const TransferRequest&) { return "not built yet"; }

}  // namespace kvio
