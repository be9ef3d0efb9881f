// How the tma backend cuts a buffer group into chunks, and which rows it can serve. Pure host code.
#pragma once

#include "request/request.h"

namespace kvio {

// Why bulk copies cannot move the rows of `request`, null when they can.
const char* tma_refusal(const TransferRequest& request);

}  // namespace kvio
