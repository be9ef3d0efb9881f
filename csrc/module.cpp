// The Python module: importing it loads the library, whose static registrations define the ops. Nothing else, so that
// the limited API suffices and one file serves every CPython from 3.10 on.
#include <Python.h>

// libstdc++'s reference counts ask this whether they may do without atomics. glibc has it from 2.32 on; with an answer
// of our own, "no", the file loads with older ones.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}

namespace {

PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "_C", "Registers torch.ops.kvio.", -1, nullptr, nullptr, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&module_definition); }
