/* The Python module `_native`: addresses and strides in, nothing checked but names. Its only caller is
 * repack_weights.py, which has checked the tensors. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string.h>

#include "native.h"

PyDoc_STRVAR(variants_doc,
             "variants() -> list of the instruction sets of this processor and build, best first.");

static PyObject *py_variants(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    PyObject *names = PyList_New(0);
    for (const struct variant *v = VARIANTS; names && v->name; v++) {
        if (!v->available())
            continue;
        PyObject *name = PyUnicode_FromString(v->name);
        if (!name || PyList_Append(names, name) < 0)
            Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

PyDoc_STRVAR(repack_doc,
             "repack(variant, bits, threads, source, source_expert_stride, source_column_stride, out,\n"
             "       out_expert_stride, out_row_stride, experts, columns, rows)\n\n"
             "Fills the Marlin words at address `out` from the packed words at `source`. Strides in bytes;\n"
             "columns = N, rows = K/16. Releases the GIL.");

static PyObject *py_repack(PyObject *module, PyObject *args)
{
    (void)module;
    const char *name;
    unsigned long long source, out;
    struct repacking job;
    if (!PyArg_ParseTuple(args, "siiKnnKnnnnn:repack", &name, &job.bits, &job.threads, &source,
                          &job.source_expert_stride, &job.source_column_stride, &out, &job.out_expert_stride,
                          &job.out_row_stride, &job.experts, &job.columns, &job.rows))
        return NULL;
    job.source = (const uint8_t *)(uintptr_t)source;
    job.out = (uint8_t *)(uintptr_t)out;
    if (job.bits != 4 && job.bits != 8)
        return PyErr_Format(PyExc_ValueError, "bits: expected 4 or 8, got %d", job.bits);

    const struct variant *variant = VARIANTS;
    while (variant->name && strcmp(variant->name, name) != 0)
        variant++;
    if (!variant->name || !variant->available())
        return PyErr_Format(PyExc_ValueError, "variant: this processor has no '%s', see variants()", name);

    PyThreadState *thread = PyEval_SaveThread();
    repack(&job, variant);
    PyEval_RestoreThread(thread);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(unpack_doc,
             "unpack(bits, source, source_expert_stride, source_row_stride, out, out_expert_stride,\n"
             "       out_column_stride, experts, columns, rows)\n\n"
             "Fills the packed words at address `out` from the Marlin words at `source`. Strides in bytes;\n"
             "columns = N, rows = K/16. Releases the GIL.");

static PyObject *py_unpack(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long long source, out;
    struct unpacking job;
    if (!PyArg_ParseTuple(args, "iKnnKnnnnn:unpack", &job.bits, &source, &job.source_expert_stride,
                          &job.source_row_stride, &out, &job.out_expert_stride, &job.out_column_stride,
                          &job.experts, &job.columns, &job.rows))
        return NULL;
    job.source = (const uint8_t *)(uintptr_t)source;
    job.out = (uint8_t *)(uintptr_t)out;
    if (job.bits != 4 && job.bits != 8)
        return PyErr_Format(PyExc_ValueError, "bits: expected 4 or 8, got %d", job.bits);

    PyThreadState *thread = PyEval_SaveThread();
    unpack(&job);
    PyEval_RestoreThread(thread);
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    {"variants", py_variants, METH_NOARGS, variants_doc},
    {"repack", py_repack, METH_VARARGS, repack_doc},
    {"unpack", py_unpack, METH_VARARGS, unpack_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot SLOTS[] = {{0, NULL}};

static struct PyModuleDef MODULE = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_native",
    .m_doc = "The C loop of weight repacking.",
    .m_methods = METHODS,
    .m_slots = SLOTS,
};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&MODULE);
}
