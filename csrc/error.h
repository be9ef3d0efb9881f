// The one way this library reports bad input: an exception whose text names the op, the argument, what it got
// and what it needs. libtorch turns it into a Python RuntimeError.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace kvio {

// Throws std::runtime_error("kvio::<op>: <parts...>").
template <class... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
  std::ostringstream text;
  text << "kvio::" << op << ": ";
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

}  // namespace kvio
