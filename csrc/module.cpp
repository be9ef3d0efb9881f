// The Python module: importing it loads the library, whose static registrations define the ops. Nothing else, so that
// the limited API suffices and one file serves every CPython from 3.10 on.
#include <Python.h>

namespace {

PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "_C", "Registers torch.ops.kvio.", -1, nullptr, nullptr, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&module_definition); }
