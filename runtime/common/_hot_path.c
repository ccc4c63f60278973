/* The parts of monitoring that run on the training thread many times a step, in C.
 *
 * With the CPU caches filled by the model, each line of Python takes about a microsecond, and the
 * same work in C a tenth of that. `hot_path.py` has the same classes in Python, which are used where
 * this module was not built. Both must do the same: tests/runtime/common/test_hot_path.py compares
 * them, and runs the tests of their users with each.
 *
 * All functions are called with the GIL held, which protects all fields.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <float.h>
#include <limits.h>
#include <structmember.h>
#include <time.h>

#ifdef Py_GIL_DISABLED
#error "the fields of these classes are protected by the GIL only"
#endif
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "StepSlots writes numbers as they are in memory"
#endif
#ifndef __linux__
#error "now_ns is the clock of time.perf_counter_ns on Linux only"
#endif

/* Another number for each change of what `hot_path.py` expects, which has the same number. */
#define VERSION 7

/* One read-only or writable field of an object, as a row of a table of members. */
#define FIELD(type, name, kind) {#name, kind, offsetof(type, name), 0, NULL}
/* A field that Python code knows by a name with a leading underscore. */
#define PRIVATE(type, name, kind) {"_" #name, kind, offsetof(type, name), 0, NULL}
#define END_OF_FIELDS {NULL, 0, 0, 0, NULL}
#define TRUTH(flag) ((flag) ? Py_True : Py_False)

/* Visits the objects in the fields of a table of members. */
static int
visit_fields(PyObject *self, const PyMemberDef *fields, visitproc visit, void *arg)
{
    for (; fields->name != NULL; fields++)
        if (fields->type == T_OBJECT || fields->type == T_OBJECT_EX)
            Py_VISIT(*(PyObject **)((char *)self + fields->offset));
    return 0;
}

/* Releases the objects in the fields of a table of members. */
static void
clear_fields(PyObject *self, const PyMemberDef *fields)
{
    for (; fields->name != NULL; fields++)
        if (fields->type == T_OBJECT || fields->type == T_OBJECT_EX)
            Py_CLEAR(*(PyObject **)((char *)self + fields->offset));
}

/* The functions for the garbage collector of a type whose objects are all in its table of members. */
#define COLLECTED(type)                                                   \
    static int type##_traverse(PyObject *self, visitproc visit, void *arg) \
    {                                                                      \
        return visit_fields(self, type##_members, visit, arg);             \
    }                                                                      \
                                                                           \
    static int type##_clear(PyObject *self)                                \
    {                                                                      \
        clear_fields(self, type##_members);                                \
        return 0;                                                          \
    }                                                                      \
                                                                           \
    static void type##_dealloc(PyObject *self)                             \
    {                                                                      \
        PyObject_GC_UnTrack(self);                                         \
        type##_clear(self);                                                \
        Py_TYPE(self)->tp_free(self);                                      \
    }

static long long
now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Interned names of attributes and methods that are looked up. */
static PyObject *s_dtype, *s_nbytes, *s_is_sparse, *s_append, *s_get_future, *s_add_done_callback,
    *s_is_cpu, *s_data_ptr, *s_is_neg, *s_numel, *s_world, *s_batch_is_full, *s_busy_until_ns,
    *s_maybe_busy_until_ns, *s_events, *s_stream_waits, *s_get_device, *s_device_index,
    *s_current_device, *s_current_stream, *s_is_capturing, *s_disabled, *s_take, *s_record,
    *s_compute, *s_blocks_compute, *s_find_end_on_device, *s_is_training_thread, *s_sees_device,
    *s_counts, *s_losses, *s_loss, *s_step, *s_ended_at, *s_skipped, *s_device_phases,
    *s_micro_batches, *s_samples, *s_tokens, *s_gradient_norm, *s_learning_rate, *s_loss_scale,
    *s_phase_ns, *s_shape, *s_is_floating_point, *s_storage_offset, *s_keep_handles,
    *s_global_steps, *s_skipped_steps, *s_module, *s_training, *s_optimizer, *s_param_groups, *s_lr,
    *s_get_global_grad_norm, *s_drain, *s_end_step, *s_begin_step, *s_known_risks,
    *s_sequence_length, *s_opentelemetry, *s_collect_in_python, *s_on_forward_start,
    *s_on_forward_end, *s_on_backward_start, *s_on_backward_end, *s_on_step_start, *s_on_step_end,
    *s_dropped_in_capture, *s_replayed_calls, *s_drain_in_python, *s_enqueue_in_python, *s_memory,
    *s_put;
static PyObject *perf_counter_ns; /* time.perf_counter_ns */

/* Replaces a field by another object. */
static void
set_object(PyObject **field, PyObject *value)
{
    PyObject *before = *field;
    *field = Py_XNewRef(value);
    Py_XDECREF(before);
}

/* Whether there is an exception that must reach the script, such as that of Ctrl-C. */
static int
is_interrupt(void)
{
    return PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception);
}

/* Takes the current exception, which is a new reference. It is not what sys.exception() returns: no
 * public function sets that for the right frame if the caller is a generator. */
static PyObject *
take_error(void)
{
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(error, traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return error;
}

/* Raises an exception that was taken, and releases it. */
static void
raise_again(PyObject *error)
{
    PyErr_Restore(Py_NewRef((PyObject *)Py_TYPE(error)), error, PyException_GetTraceback(error));
}

/* Returns whether an attribute, or the result of a method, is this singleton. */
static int
is_attribute(PyObject *object, PyObject *name, PyObject *expected, int is_method)
{
    PyObject *found =
        is_method ? PyObject_CallMethodNoArgs(object, name) : PyObject_GetAttr(object, name);
    Py_XDECREF(found);
    return found == expected;
}

/* Returns whether these are the arguments of a call in a tuple and a dict, for an object with a
 * state. If not, a TypeError is set. */
static int
are_arguments(void *state, PyObject *const *args, size_t nargsf, PyObject *names)
{
    if (state != NULL && PyVectorcall_NARGS(nargsf) == 2 && names == NULL &&
        PyTuple_Check(args[0]) && PyDict_Check(args[1]))
        return 1;
    PyErr_SetString(PyExc_TypeError, "expected the arguments of a call: a tuple and a dict");
    return 0;
}

/* ---- PhaseClock: see hot_path.py ---- */

#define MAX_PHASES 16

typedef struct {
    PyObject_HEAD
    PyObject *now;       /* a clock that Python code gave; NULL for perf_counter_ns */
    PyObject *on_change; /* NULL stands for None, as in all fields of kind T_OBJECT */
    PyObject *on_interval_end;
    PyObject *intervals;
    long long totals[MAX_PHASES];
    long long since_ns;
    int *outer; /* the phases around the current one */
    Py_ssize_t depth, capacity;
    int num_phases, current;
    unsigned int non_training; /* a bit for each phase that is not training */
    unsigned long training_thread;
    char started, stopped, left_training;
} PhaseClock;

static int
PhaseClock_init(PhaseClock *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"now_ns", "num_phases", "first", "non_training", NULL};
    PyObject *now, *non_training;
    int num_phases, first;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OiiO!", names, &now, &num_phases, &first,
                                     &PyTuple_Type, &non_training))
        return -1;
    if (num_phases > MAX_PHASES || first < 0 || first >= num_phases) {
        PyErr_Format(PyExc_ValueError, "from 1 to %d phases, and the first among them; got %d, %d",
                     MAX_PHASES, num_phases, first);
        return -1;
    }
    self->non_training = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(non_training); i++) {
        long phase = PyLong_AsLong(PyTuple_GET_ITEM(non_training, i));
        if (phase < 0 || phase >= num_phases) {
            if (!PyErr_Occurred())
                PyErr_Format(PyExc_ValueError, "no phase has the number %ld", phase);
            return -1;
        }
        self->non_training |= 1u << phase;
    }
    set_object(&self->now, now == perf_counter_ns ? NULL : now);
    self->num_phases = num_phases;
    self->current = first;
    return 0;
}

static int
clock_now(PhaseClock *self, long long *found)
{
    if (self->now == NULL) {
        *found = now_ns();
        return 0;
    }
    PyObject *number = PyObject_CallNoArgs(self->now);
    if (number == NULL)
        return -1;
    *found = PyLong_AsLongLong(number);
    Py_DECREF(number);
    return *found == -1 && PyErr_Occurred() ? -1 : 0;
}

static int
call_with_phase(PyObject *callback, int phase)
{
    if (callback == NULL || callback == Py_None)
        return 0;
    PyObject *number = PyLong_FromLong(phase);
    if (number == NULL)
        return -1;
    PyObject *kept = Py_NewRef(callback); /* it may replace itself */
    PyObject *result = PyObject_CallOneArg(kept, number);
    Py_DECREF(kept);
    Py_DECREF(number);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

static int
accrue(PhaseClock *self, int is_counted)
{
    if (call_with_phase(self->on_change, self->current) < 0)
        return -1;
    is_counted = is_counted && !self->stopped;
    self->stopped = 0;
    if (call_with_phase(self->on_interval_end, is_counted ? self->current : -1) < 0)
        return -1;
    long long now;
    if (clock_now(self, &now) < 0)
        return -1;
    if (is_counted) {
        self->totals[self->current] += now - self->since_ns;
        if (self->intervals != NULL && self->intervals != Py_None) {
            PyObject *interval = Py_BuildValue("iLL", self->current, self->since_ns, now);
            if (interval == NULL)
                return -1;
            PyObject *result = PyObject_CallMethodOneArg(self->intervals, s_append, interval);
            Py_DECREF(interval);
            if (result == NULL)
                return -1;
            Py_DECREF(result);
        }
    }
    self->since_ns = now;
    return 0;
}

static int
enter_phase(PhaseClock *self, long phase)
{
    if (phase < 0 || phase >= self->num_phases) {
        PyErr_Format(PyExc_IndexError, "no phase has the number %ld", phase);
        return -1;
    }
    if (!self->started) {
        self->started = 1;
        if (clock_now(self, &self->since_ns) < 0)
            return -1;
    }
    if (accrue(self, 1) < 0)
        return -1;
    if (self->depth == self->capacity) { /* here, as a callback may have entered a phase */
        Py_ssize_t capacity = 2 * self->capacity + 8;
        int *outer = PyMem_Realloc(self->outer, (size_t)capacity * sizeof(int));
        if (outer == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        self->outer = outer;
        self->capacity = capacity;
    }
    self->outer[self->depth++] = self->current;
    self->current = (int)phase;
    if (self->non_training >> phase & 1)
        self->left_training = 1;
    return 0;
}

static int
leave_phase(PhaseClock *self)
{
    if (accrue(self, 1) < 0)
        return -1;
    if (self->depth == 0) {
        PyErr_SetString(PyExc_IndexError, "no phase has begun");
        return -1;
    }
    self->current = self->outer[--self->depth];
    return 0;
}

static PyObject *
PhaseClock_enter(PhaseClock *self, PyObject *argument)
{
    long phase = PyLong_AsLong(argument);
    if ((phase == -1 && PyErr_Occurred()) || enter_phase(self, phase) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *
PhaseClock_leave(PhaseClock *self, PyObject *Py_UNUSED(ignored))
{
    if (leave_phase(self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *
PhaseClock_accrue(PhaseClock *self, PyObject *is_counted)
{
    int counted = PyObject_IsTrue(is_counted);
    if (counted < 0 || accrue(self, counted) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *
PhaseClock_nanoseconds(PhaseClock *self, PyObject *argument)
{
    long phase = PyLong_AsLong(argument);
    if (phase < 0 || phase >= self->num_phases) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_IndexError, "no phase has the number %ld", phase);
        return NULL;
    }
    return PyLong_FromLongLong(self->totals[phase]);
}

static PyObject *
PhaseClock_drain(PhaseClock *self, PyObject *Py_UNUSED(ignored))
{
    if (accrue(self, 1) < 0)
        return NULL;
    PyObject *totals = PyList_New(self->num_phases);
    if (totals == NULL)
        return NULL;
    for (int phase = 0; phase < self->num_phases; phase++) {
        PyObject *number = PyLong_FromLongLong(self->totals[phase]);
        if (number == NULL) {
            Py_DECREF(totals);
            return NULL;
        }
        PyList_SET_ITEM(totals, phase, number);
        self->totals[phase] = 0;
    }
    return totals;
}

static int
PhaseClock_traverse(PhaseClock *self, visitproc visit, void *arg)
{
    Py_VISIT(self->now);
    Py_VISIT(self->on_change);
    Py_VISIT(self->on_interval_end);
    Py_VISIT(self->intervals);
    return 0;
}

static int
PhaseClock_clear(PhaseClock *self)
{
    Py_CLEAR(self->now);
    Py_CLEAR(self->on_change);
    Py_CLEAR(self->on_interval_end);
    Py_CLEAR(self->intervals);
    return 0;
}

static void
PhaseClock_dealloc(PhaseClock *self)
{
    PyObject_GC_UnTrack(self);
    PhaseClock_clear(self);
    PyMem_Free(self->outer);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMemberDef PhaseClock_members[] = {
    {"current", T_INT, offsetof(PhaseClock, current), READONLY, NULL},
    FIELD(PhaseClock, since_ns, T_LONGLONG),
    FIELD(PhaseClock, training_thread, T_ULONG),
    FIELD(PhaseClock, left_training, T_BOOL),
    FIELD(PhaseClock, on_change, T_OBJECT),
    FIELD(PhaseClock, on_interval_end, T_OBJECT),
    PRIVATE(PhaseClock, intervals, T_OBJECT),
    PRIVATE(PhaseClock, stopped, T_BOOL),
    END_OF_FIELDS,
};

static PyMethodDef PhaseClock_methods[] = {
    {"enter", (PyCFunction)PhaseClock_enter, METH_O, NULL},
    {"leave", (PyCFunction)PhaseClock_leave, METH_NOARGS, NULL},
    {"drain", (PyCFunction)PhaseClock_drain, METH_NOARGS, NULL},
    {"_accrue", (PyCFunction)PhaseClock_accrue, METH_O, NULL},
    {"_nanoseconds", (PyCFunction)PhaseClock_nanoseconds, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject PhaseClock_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "zerowatch.runtime.common._hot_path.PhaseClock",
    .tp_basicsize = sizeof(PhaseClock),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)PhaseClock_init,
    .tp_dealloc = (destructor)PhaseClock_dealloc,
    .tp_traverse = (traverseproc)PhaseClock_traverse,
    .tp_clear = (inquiry)PhaseClock_clear,
    .tp_members = PhaseClock_members,
    .tp_methods = PhaseClock_methods,
};

/* ---- Hook: see hot_path.py ---- */

typedef struct {
    PyObject_HEAD
    PyObject *body, *catches, *on_failure, *may_resume, *on_success;
    vectorcallfunc vectorcall;
    char is_off, is_short;
} Hook;

static PyObject *
Hook_failed(Hook *self)
{
    if (!PyErr_ExceptionMatches(self->catches))
        return NULL;
    PyObject *error = take_error();
    PyObject *result =
        PyObject_CallFunctionObjArgs(self->on_failure, (PyObject *)self, error, NULL);
    Py_DECREF(error);
    if (result == NULL)
        return NULL;
    Py_DECREF(result);
    Py_RETURN_NONE;
}

static PyObject *
Hook_vectorcall(Hook *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    if (self->body == NULL) /* cleared by the collector */
        Py_RETURN_NONE;
    if (self->is_off) {
        PyObject *answer = PyObject_CallOneArg(self->may_resume, (PyObject *)self);
        if (answer == NULL)
            return NULL;
        int resumes = PyObject_IsTrue(answer);
        Py_DECREF(answer);
        if (resumes < 0)
            return NULL;
        if (!resumes)
            Py_RETURN_NONE;
    }
    PyObject *result = PyObject_Vectorcall(self->body, args, nargsf, names);
    if (result == NULL)
        return Hook_failed(self);
    if (self->is_short) {
        PyObject *done = PyObject_CallOneArg(self->on_success, (PyObject *)self);
        if (done == NULL) {
            Py_DECREF(result);
            return NULL;
        }
        Py_DECREF(done);
    }
    return result;
}

static int
Hook_init(Hook *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"body", "catches", "on_failure", "may_resume", "on_success", NULL};
    PyObject *body, *catches, *on_failure, *may_resume, *on_success;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOO", names, &body, &catches, &on_failure,
                                     &may_resume, &on_success))
        return -1;
    set_object(&self->body, body);
    set_object(&self->catches, catches);
    set_object(&self->on_failure, on_failure);
    set_object(&self->may_resume, may_resume);
    set_object(&self->on_success, on_success);
    self->vectorcall = (vectorcallfunc)Hook_vectorcall;
    return 0;
}

static int
Hook_traverse(Hook *self, visitproc visit, void *arg)
{
    Py_VISIT(self->body);
    Py_VISIT(self->catches);
    Py_VISIT(self->on_failure);
    Py_VISIT(self->may_resume);
    Py_VISIT(self->on_success);
    return 0;
}

static int
Hook_clear(Hook *self)
{
    Py_CLEAR(self->body);
    Py_CLEAR(self->catches);
    Py_CLEAR(self->on_failure);
    Py_CLEAR(self->may_resume);
    Py_CLEAR(self->on_success);
    return 0;
}

static void
Hook_dealloc(Hook *self)
{
    PyObject_GC_UnTrack(self);
    Hook_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* As functions, which the copy of a model or an engine shares with the original. */
static PyObject *
Hook_copy(Hook *self, PyObject *Py_UNUSED(memo))
{
    return Py_NewRef((PyObject *)self);
}

static PyObject *
Hook_reduce(Hook *self, PyObject *Py_UNUSED(ignored))
{
    PyErr_SetString(PyExc_TypeError, "cannot pickle a hook of zerowatch");
    return NULL;
}

static PyMethodDef Hook_methods[] = {
    {"__copy__", (PyCFunction)Hook_copy, METH_NOARGS, NULL},
    {"__deepcopy__", (PyCFunction)Hook_copy, METH_O, NULL},
    {"__reduce__", (PyCFunction)Hook_reduce, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef Hook_members[] = {
    FIELD(Hook, is_off, T_BOOL),
    FIELD(Hook, is_short, T_BOOL),
    END_OF_FIELDS,
};

static PyTypeObject Hook_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "zerowatch.runtime.common._hot_path.Hook",
    .tp_basicsize = sizeof(Hook),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Hook, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Hook_init,
    .tp_dealloc = (destructor)Hook_dealloc,
    .tp_traverse = (traverseproc)Hook_traverse,
    .tp_clear = (inquiry)Hook_clear,
    .tp_members = Hook_members,
    .tp_methods = Hook_methods,
};

/* ---- RankSetFields, GroupFields, CollectiveCall: see hot_path.py and collectives/groups.py ---- */

typedef struct {
    PyObject_HEAD
    PyObject *recent;
    long long issued;
} RankSetFields;

typedef struct {
    PyObject_HEAD
    PyObject *reference, *rank_set;
    long long recorded, busy_until_ns, maybe_busy_until_ns;
    char on_device;
} GroupFields;

typedef struct {
    PyObject_HEAD
    PyObject *group, *dtype, *start_event, *end_event, *stream_wait;
    long long payload_bytes, sequence, batch;
    long long start_ns, end_ns, issued_ns, wait_ns, duration_ns, exposed_ns, wait_exposed_ns;
    int op, phase, wait_phase;
    char timed, is_bound, is_lost, settled;
} CollectiveCall;

static PyMemberDef RankSetFields_members[] = {
    FIELD(RankSetFields, recent, T_OBJECT_EX),
    FIELD(RankSetFields, issued, T_LONGLONG),
    END_OF_FIELDS,
};

COLLECTED(RankSetFields)

static PyTypeObject RankSetFields_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "zerowatch.runtime.common._hot_path.RankSetFields",
    .tp_basicsize = sizeof(RankSetFields),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)RankSetFields_dealloc,
    .tp_traverse = (traverseproc)RankSetFields_traverse,
    .tp_clear = (inquiry)RankSetFields_clear,
    .tp_members = RankSetFields_members,
};

static PyMemberDef GroupFields_members[] = {
    FIELD(GroupFields, reference, T_OBJECT_EX),
    FIELD(GroupFields, rank_set, T_OBJECT_EX),
    FIELD(GroupFields, recorded, T_LONGLONG),
    FIELD(GroupFields, busy_until_ns, T_LONGLONG),
    FIELD(GroupFields, maybe_busy_until_ns, T_LONGLONG),
    FIELD(GroupFields, on_device, T_BOOL),
    END_OF_FIELDS,
};

COLLECTED(GroupFields)

static PyTypeObject GroupFields_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "zerowatch.runtime.common._hot_path.GroupFields",
    .tp_basicsize = sizeof(GroupFields),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)GroupFields_dealloc,
    .tp_traverse = (traverseproc)GroupFields_traverse,
    .tp_clear = (inquiry)GroupFields_clear,
    .tp_members = GroupFields_members,
};

static int
CollectiveCall_init(CollectiveCall *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"op", "group", "payload_bytes", "dtype", "phase", NULL};
    PyObject *group, *dtype;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iOLOi", names, &self->op, &group,
                                     &self->payload_bytes, &dtype, &self->phase))
        return -1;
    set_object(&self->group, group);
    set_object(&self->dtype, dtype);
    self->timed = 1;
    return 0;
}

static long long
larger(long long one, long long other)
{
    return one > other ? one : other;
}

/* Returns the time between two moments, which may be NEVER; 0 if the second is not after the first. */
static long long
between(long long begin, long long end)
{
    return end > begin ? end - begin : 0;
}

/* Reads when the earlier calls of a group ended, or may have ended. Tests have other groups. */
static int
read_busy(PyObject *group, long long *until, long long *maybe_until)
{
    if (PyObject_TypeCheck(group, &GroupFields_Type)) {
        *until = ((GroupFields *)group)->busy_until_ns;
        *maybe_until = ((GroupFields *)group)->maybe_busy_until_ns;
        return 0;
    }
    PyObject *first = PyObject_GetAttr(group, s_busy_until_ns);
    PyObject *second = first == NULL ? NULL : PyObject_GetAttr(group, s_maybe_busy_until_ns);
    if (second != NULL) {
        *until = PyLong_AsLongLong(first);
        *maybe_until = PyLong_AsLongLong(second);
    }
    Py_XDECREF(first);
    Py_XDECREF(second);
    return PyErr_Occurred() ? -1 : 0;
}

static int
write_ns(PyObject *group, PyObject *name, long long value)
{
    PyObject *number = PyLong_FromLongLong(value);
    int status = number == NULL ? -1 : PyObject_SetAttr(group, name, number);
    Py_XDECREF(number);
    return status;
}

static int
write_busy(PyObject *group, long long until, long long maybe_until)
{
    if (PyObject_TypeCheck(group, &GroupFields_Type)) {
        ((GroupFields *)group)->busy_until_ns = until;
        ((GroupFields *)group)->maybe_busy_until_ns = maybe_until;
        return 0;
    }
    if (write_ns(group, s_busy_until_ns, until) < 0)
        return -1;
    return write_ns(group, s_maybe_busy_until_ns, maybe_until);
}

static PyObject *
CollectiveCall_settle(CollectiveCall *self, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args > 1 || self->group == NULL) {
        PyErr_SetString(PyExc_TypeError, "settle takes the number of a batch, of a call of a group");
        return NULL;
    }
    self->batch = num_args == 0 ? 0 : PyLong_AsLongLong(args[0]);
    if (self->batch == -1 && PyErr_Occurred())
        return NULL;
    self->duration_ns = self->exposed_ns = self->wait_exposed_ns = 0;
    if (self->timed || self->is_bound) {
        long long busy_until = 0, maybe_busy_until = 0, end_ns = self->end_ns;
        if (read_busy(self->group, &busy_until, &maybe_busy_until) < 0)
            return NULL;
        if (!self->timed)
            maybe_busy_until = LLONG_MAX;
        else {
            self->duration_ns = between(larger(self->start_ns, busy_until), end_ns);
            if (self->is_bound)
                maybe_busy_until = end_ns;
            else {
                self->is_bound = self->start_ns < maybe_busy_until;
                busy_until = larger(end_ns, busy_until);
                maybe_busy_until = LLONG_MIN;
            }
            long long issued_ns = self->issued_ns < end_ns ? self->issued_ns : end_ns;
            if (self->wait_ns)
                self->wait_exposed_ns = between(larger(self->wait_ns, issued_ns), end_ns);
            self->exposed_ns = issued_ns - self->start_ns + self->wait_exposed_ns;
        }
        if (write_busy(self->group, busy_until, maybe_busy_until) < 0)
            return NULL;
    }
    self->settled = 1;
    Py_RETURN_NONE;
}

static PyObject *
CollectiveCall_values(CollectiveCall *self, PyObject *Py_UNUSED(unused))
{
    int is_on_device = self->start_event != NULL && self->start_event != Py_None;
    return Py_BuildValue("(iLiLLLLLiOOOO)", self->op, self->payload_bytes, self->phase,
                         self->sequence, self->start_ns, self->end_ns, self->issued_ns,
                         self->wait_ns, self->wait_ns ? self->wait_phase : 0, TRUTH(self->timed),
                         TRUTH(self->is_bound), TRUTH(self->is_lost), TRUTH(is_on_device));
}

/* The collector does not see a call: a step has many, and they would make it run more often. Calls
 * refer to their group, whose rank set refers to the last calls: they live as long as the groups,
 * and these as long as the process. */
static void
CollectiveCall_dealloc(CollectiveCall *self)
{
    Py_CLEAR(self->group);
    Py_CLEAR(self->dtype);
    Py_CLEAR(self->start_event);
    Py_CLEAR(self->end_event);
    Py_CLEAR(self->stream_wait);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMemberDef CollectiveCall_members[] = {
    FIELD(CollectiveCall, op, T_INT),
    FIELD(CollectiveCall, group, T_OBJECT_EX),
    FIELD(CollectiveCall, payload_bytes, T_LONGLONG),
    FIELD(CollectiveCall, dtype, T_OBJECT),
    FIELD(CollectiveCall, phase, T_INT),
    FIELD(CollectiveCall, sequence, T_LONGLONG),
    FIELD(CollectiveCall, start_ns, T_LONGLONG),
    FIELD(CollectiveCall, end_ns, T_LONGLONG),
    FIELD(CollectiveCall, issued_ns, T_LONGLONG),
    FIELD(CollectiveCall, wait_ns, T_LONGLONG),
    FIELD(CollectiveCall, wait_phase, T_INT),
    FIELD(CollectiveCall, timed, T_BOOL),
    FIELD(CollectiveCall, is_bound, T_BOOL),
    FIELD(CollectiveCall, is_lost, T_BOOL),
    FIELD(CollectiveCall, settled, T_BOOL),
    FIELD(CollectiveCall, start_event, T_OBJECT),
    FIELD(CollectiveCall, end_event, T_OBJECT),
    FIELD(CollectiveCall, stream_wait, T_OBJECT),
    FIELD(CollectiveCall, batch, T_LONGLONG),
    FIELD(CollectiveCall, duration_ns, T_LONGLONG),
    FIELD(CollectiveCall, exposed_ns, T_LONGLONG),
    FIELD(CollectiveCall, wait_exposed_ns, T_LONGLONG),
    END_OF_FIELDS,
};

static PyMethodDef CollectiveCall_methods[] = {
    {"settle", (PyCFunction)(void (*)(void))CollectiveCall_settle, METH_FASTCALL, NULL},
    {"values", (PyCFunction)CollectiveCall_values, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject CollectiveCall_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "zerowatch.runtime.common._hot_path.CollectiveCall",
    .tp_basicsize = sizeof(CollectiveCall),
    .tp_flags = Py_TPFLAGS_DEFAULT, /* a subclass would be seen by the collector */
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)CollectiveCall_init,
    .tp_dealloc = (destructor)CollectiveCall_dealloc,
    .tp_members = CollectiveCall_members,
    .tp_methods = CollectiveCall_methods,
};

static PyObject *
have_ended_on_host(PyObject *Py_UNUSED(module), PyObject *calls)
{
    if (!PyList_Check(calls)) {
        PyErr_SetString(PyExc_TypeError, "expected a list of calls");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(calls); i++) {
        CollectiveCall *call = (CollectiveCall *)PyList_GET_ITEM(calls, i);
        if (!Py_IS_TYPE(call, &CollectiveCall_Type) || !call->timed || call->end_ns == 0 ||
            (call->start_event != NULL && call->start_event != Py_None))
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

/* ---- RecorderFields: what a call reads and writes of collectives/call_recorder.py ---- */

typedef struct {
    PyObject_HEAD
    PyObject *phase_timer; /* a PhaseClock, or None */
    PyObject *calls, *works, *under_way, *messages, *coalescing, *known_groups, *new_batch;
    PyObject *stream_waits;
    unsigned long long training_thread;
    long long left_out, num_gaps;
    char is_draining, sees_device;
} RecorderFields;

static PyMemberDef RecorderFields_members[] = {
    PRIVATE(RecorderFields, phase_timer, T_OBJECT),
    PRIVATE(RecorderFields, calls, T_OBJECT_EX),
    PRIVATE(RecorderFields, works, T_OBJECT_EX),
    PRIVATE(RecorderFields, under_way, T_OBJECT_EX),
    PRIVATE(RecorderFields, messages, T_OBJECT_EX),
    PRIVATE(RecorderFields, coalescing, T_OBJECT_EX),
    PRIVATE(RecorderFields, known_groups, T_OBJECT_EX),
    PRIVATE(RecorderFields, new_batch, T_OBJECT_EX),
    FIELD(RecorderFields, stream_waits, T_OBJECT_EX),
    PRIVATE(RecorderFields, left_out, T_LONGLONG),
    PRIVATE(RecorderFields, num_gaps, T_LONGLONG),
    PRIVATE(RecorderFields, sees_device, T_BOOL),
    PRIVATE(RecorderFields, training_thread, T_ULONGLONG),
    PRIVATE(RecorderFields, is_draining, T_BOOL),
    END_OF_FIELDS,
};

COLLECTED(RecorderFields)

/* Returns the calls so far, and begins a new list; None while `_is_draining`. */
static PyObject *
RecorderFields_take_calls(RecorderFields *self, PyObject *Py_UNUSED(ignored))
{
    PyObject *empty = PyList_New(0); /* first: it may collect garbage, which may take the calls */
    if (empty == NULL)
        return NULL;
    if (self->is_draining) {
        Py_DECREF(empty);
        Py_RETURN_NONE;
    }
    PyObject *calls = self->calls;
    self->calls = empty;
    return calls == NULL ? PyList_New(0) : calls;
}

/* Adds an integer that is an attribute of an object. Returns 0, or -1 after an error. */
static int
add_attribute(PyObject *object, PyObject *name, long long *sum)
{
    PyObject *number = PyObject_GetAttr(object, name);
    long long value = number == NULL ? -1 : PyLong_AsLongLong(number);
    Py_XDECREF(number);
    *sum += value;
    return value == -1 && PyErr_Occurred() ? -1 : 0;
}

/* Returns a batch of the calls so far. With calls on a device, and while the watch thread takes
 * calls, Python code does. */
static PyObject *
RecorderFields_drain(RecorderFields *self, PyObject *Py_UNUSED(ignored))
{
    PyObject *calls = NULL;
    long long num_gaps = self->left_out;
    if (!self->sees_device && self->new_batch != NULL && self->stream_waits != NULL) {
        if (add_attribute(self->stream_waits, s_dropped_in_capture, &num_gaps) < 0 ||
            add_attribute(self->stream_waits, s_replayed_calls, &num_gaps) < 0 ||
            (calls = RecorderFields_take_calls(self, NULL)) == NULL)
            return NULL;
        if (calls == Py_None)
            Py_CLEAR(calls);
    }
    if (calls == NULL)
        return PyObject_CallMethodNoArgs((PyObject *)self, s_drain_in_python);
    PyObject *parts[] = {calls, Py_None, TRUTH(num_gaps == self->num_gaps)};
    PyObject *batch = PyObject_Vectorcall(self->new_batch, parts, 3, NULL);
    self->num_gaps = num_gaps;
    Py_DECREF(calls);
    return batch;
}

static PyMethodDef RecorderFields_methods[] = {
    {"drain", (PyCFunction)RecorderFields_drain, METH_NOARGS, NULL},
    {"_take_calls", (PyCFunction)RecorderFields_take_calls, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject RecorderFields_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "zerowatch.runtime.common._hot_path.RecorderFields",
    .tp_basicsize = sizeof(RecorderFields),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)RecorderFields_dealloc,
    .tp_traverse = (traverseproc)RecorderFields_traverse,
    .tp_clear = (inquiry)RecorderFields_clear,
    .tp_members = RecorderFields_members,
    .tp_methods = RecorderFields_methods,
};

/* ---- HookState, WrapperState: see hot_path.py ---- */

typedef struct {
    PyObject_HEAD
    long long cost_ns;
    char is_open;
} HookState;

static PyMemberDef HookState_members[] = {
    FIELD(HookState, is_open, T_BOOL),
    FIELD(HookState, cost_ns, T_LONGLONG),
    END_OF_FIELDS,
};

static PyTypeObject HookState_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "zerowatch.runtime.common._hot_path.HookState",
    .tp_basicsize = sizeof(HookState),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = PyType_GenericNew,
    .tp_members = HookState_members,
};

typedef struct {
    HookState hooks;
    Py_tss_t inside; /* whether the thread is inside a wrapped call */
} WrapperState;

static int
WrapperState_init(WrapperState *self, PyObject *args, PyObject *kwargs)
{
    if (PyThread_tss_create(&self->inside) != 0) {
        PyErr_SetString(PyExc_MemoryError, "no storage for a value by thread");
        return -1;
    }
    return 0;
}

static void
WrapperState_dealloc(WrapperState *self)
{
    PyThread_tss_delete(&self->inside);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Both need the key that __init__ makes. */
static int
is_inside(WrapperState *self)
{
    return PyThread_tss_get(&self->inside) != NULL;
}

static void
set_inside(WrapperState *self, int inside)
{
    PyThread_tss_set(&self->inside, inside ? self : NULL);
}

static PyObject *
WrapperState_get_value(WrapperState *self, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(PyThread_tss_is_created(&self->inside) && is_inside(self));
}

static int
WrapperState_set_value(WrapperState *self, PyObject *value, void *Py_UNUSED(closure))
{
    int inside = value == NULL ? 0 : PyObject_IsTrue(value);
    if (inside < 0)
        return -1;
    if (!PyThread_tss_is_created(&self->inside)) {
        PyErr_SetString(PyExc_RuntimeError, "WrapperState was not initialized");
        return -1;
    }
    set_inside(self, inside);
    return 0;
}

static PyGetSetDef WrapperState_getset[] = {
    {"value", (getter)WrapperState_get_value, (setter)WrapperState_set_value, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject WrapperState_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "zerowatch.runtime.common._hot_path.WrapperState",
    .tp_base = &HookState_Type,
    .tp_basicsize = sizeof(WrapperState),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)WrapperState_init,
    .tp_dealloc = (destructor)WrapperState_dealloc,
    .tp_getset = WrapperState_getset,
};

/* ---- HookedCall: see hot_path.py ---- */

typedef struct {
    PyObject_HEAD
    HookState *state;
    PyObject *original, *on_start, *on_end, *on_exception;
    vectorcallfunc vectorcall;
    char is_paired;
} HookedCall;

/* Calls the first hook. Returns whether the last one must be called; -1 after an interrupt. */
static int
begin_hooked(HookedCall *self, PyObject *const *both)
{
    PyObject *answer = PyObject_Vectorcall(self->on_start, both, 2, NULL);
    if (answer == NULL)
        return -1;
    int has_begun = self->is_paired ? PyObject_IsTrue(answer) : 1;
    Py_DECREF(answer);
    return has_begun;
}

/* A chain of exceptions may be a circle. */
#define MAX_CONTEXTS 100

/* Whether an exception is `error`, or one of the contexts behind it. */
static int
is_behind(PyObject *error, PyObject *exception)
{
    PyObject *link = Py_XNewRef(error);
    for (int i = 0; i < MAX_CONTEXTS && link != NULL && link != exception; i++)
        Py_SETREF(link, PyException_GetContext(link));
    Py_XDECREF(link);
    return link != NULL && link == exception;
}

/* Takes an interrupt that was raised while `error`, which it releases, was handled. An exception
 * that the script handled before is behind both, and stays behind `error`. */
static PyObject *
take_interrupt(PyObject *error)
{
    PyObject *interrupt = take_error(), *last = Py_NewRef(interrupt), *context;
    for (int i = 0; i < MAX_CONTEXTS; i++) {
        if ((context = PyException_GetContext(last)) == NULL)
            break;
        if (is_behind(error, context)) {
            Py_DECREF(context);
            break;
        }
        Py_SETREF(last, context);
    }
    if (error != NULL && !is_behind(error, last))
        PyException_SetContext(last, Py_NewRef(error)); /* takes the reference */
    Py_DECREF(last);
    Py_XDECREF(error);
    return interrupt;
}

static PyObject *
call_hooked(HookedCall *self, PyObject *const *both)
{
    HookState *state = self->state;
    if (!state->is_open)
        return PyObject_Call(self->original, both[0], both[1]);
    long long entered_ns = now_ns();
    int has_begun = begin_hooked(self, both);
    if (has_begun < 0)
        return NULL;
    long long started_ns = now_ns();
    PyObject *result = PyObject_Call(self->original, both[0], both[1]);
    PyObject *error = result == NULL ? take_error() : NULL;
    if (error != NULL && (PyErr_GivenExceptionMatches(error, PyExc_RuntimeError) ||
                          PyErr_GivenExceptionMatches(error, PyExc_MemoryError))) {
        PyObject *answer = PyObject_CallOneArg(self->on_exception, error);
        if (answer == NULL)
            error = take_interrupt(error);
        Py_XDECREF(answer);
    }
    long long ended_ns = now_ns();
    if (has_begun) {
        PyObject *outcome[] = {result == NULL ? Py_None : result,
                               result == NULL ? Py_False : Py_True};
        PyObject *answer = PyObject_Vectorcall(self->on_end, outcome, 2, NULL);
        if (answer == NULL) {
            Py_CLEAR(result);
            error = take_interrupt(error);
        }
        Py_XDECREF(answer);
    }
    state->cost_ns += now_ns() - ended_ns + started_ns - entered_ns;
    if (error != NULL)
        raise_again(error);
    return result;
}

static PyObject *
HookedCall_vectorcall(HookedCall *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    if (!are_arguments(self->state, args, nargsf, names))
        return NULL;
    return call_hooked(self, args);
}

static int
HookedCall_init(HookedCall *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"state",  "original",     "on_start", "on_end",
                            "on_exception", "is_paired", NULL};
    PyObject *state, *original, *on_start, *on_end, *on_exception;
    int is_paired;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OOOOp", names, &HookState_Type, &state,
                                     &original, &on_start, &on_end, &on_exception, &is_paired))
        return -1;
    Py_XSETREF(self->state, (HookState *)Py_NewRef(state));
    set_object(&self->original, original);
    set_object(&self->on_start, on_start);
    set_object(&self->on_end, on_end);
    set_object(&self->on_exception, on_exception);
    self->is_paired = (char)is_paired;
    self->vectorcall = (vectorcallfunc)HookedCall_vectorcall;
    return 0;
}

static int
HookedCall_traverse(HookedCall *self, visitproc visit, void *arg)
{
    Py_VISIT(self->state);
    Py_VISIT(self->original);
    Py_VISIT(self->on_start);
    Py_VISIT(self->on_end);
    Py_VISIT(self->on_exception);
    return 0;
}

static int
HookedCall_clear(HookedCall *self)
{
    Py_CLEAR(self->state);
    Py_CLEAR(self->original);
    Py_CLEAR(self->on_start);
    Py_CLEAR(self->on_end);
    Py_CLEAR(self->on_exception);
    return 0;
}

static void
HookedCall_dealloc(HookedCall *self)
{
    PyObject_GC_UnTrack(self);
    HookedCall_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject HookedCall_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "zerowatch.runtime.common._hot_path.HookedCall",
    .tp_basicsize = sizeof(HookedCall),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(HookedCall, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)HookedCall_init,
    .tp_dealloc = (destructor)HookedCall_dealloc,
    .tp_traverse = (traverseproc)HookedCall_traverse,
    .tp_clear = (inquiry)HookedCall_clear,
};

/* ---- CallEnd: the callback at the end of an asynchronous call ---- */

typedef struct {
    PyObject_HEAD
    RecorderFields *recorder;
    CollectiveCall *call;
    PyObject *key; /* the id of the handle */
} CallEnd;

static PyObject *
CallEnd_call(CallEnd *self, PyObject *args, PyObject *kwargs)
{
    RecorderFields *recorder = self->recorder;
    self->call->end_ns = now_ns();
    PyObject *entry = PyDict_GetItemWithError(recorder->works, self->key);
    int failed = entry == NULL && PyErr_Occurred();
    if (entry != NULL && PyTuple_GET_ITEM(entry, 1) == (PyObject *)self->call)
        failed = PyDict_DelItem(recorder->works, self->key) < 0;
    if (failed || PySet_Discard(recorder->under_way, (PyObject *)self->call) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static int
CallEnd_traverse(CallEnd *self, visitproc visit, void *arg)
{
    Py_VISIT(self->recorder);
    return 0;
}

static void
CallEnd_dealloc(CallEnd *self)
{
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->recorder);
    Py_CLEAR(self->call);
    Py_CLEAR(self->key);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject CallEnd_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "zerowatch.runtime.common._hot_path.CallEnd",
    .tp_basicsize = sizeof(CallEnd),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_call = (ternaryfunc)CallEnd_call,
    .tp_dealloc = (destructor)CallEnd_dealloc,
    .tp_traverse = (traverseproc)CallEnd_traverse,
};

/* ---- RecordedFunction: see hot_path.py ---- */

typedef struct {
    PyObject_HEAD
    WrapperState *state;
    RecorderFields *recorder;
    PyObject *original, *in_python, *on_call, *on_failure, *tensor_type, *group_member;
    PyObject *payload_name, *group_name;
    Py_ssize_t payload_place, group_place;
    int op, max_calls;
    vectorcallfunc vectorcall;
} RecordedFunction;

static PyObject *RecordedFunction_vectorcall(RecordedFunction *, PyObject *const *, size_t,
                                             PyObject *);

static int
RecordedFunction_init(RecordedFunction *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"state",        "recorder",      "original",     "in_python",
                            "on_call",      "on_failure",    "tensor_type",  "group_member",
                            "payload_place", "payload_name", "group_place",  "op",
                            "max_calls",    NULL};
    PyObject *state, *recorder, *original, *in_python, *on_call, *on_failure, *tensor_type,
        *group_member, *payload_name;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!OOOOOOnUnii", names, &WrapperState_Type,
                                     &state, &RecorderFields_Type, &recorder, &original,
                                     &in_python, &on_call, &on_failure, &tensor_type,
                                     &group_member, &self->payload_place, &payload_name,
                                     &self->group_place, &self->op, &self->max_calls))
        return -1;
    Py_XSETREF(self->state, (WrapperState *)Py_NewRef(state));
    Py_XSETREF(self->recorder, (RecorderFields *)Py_NewRef(recorder));
    set_object(&self->original, original);
    set_object(&self->in_python, in_python);
    set_object(&self->on_call, on_call);
    set_object(&self->on_failure, on_failure);
    set_object(&self->tensor_type, tensor_type);
    set_object(&self->group_member, group_member);
    set_object(&self->payload_name, payload_name);
    self->vectorcall = (vectorcallfunc)RecordedFunction_vectorcall;
    Py_XSETREF(self->group_name, PyUnicode_InternFromString("group"));
    return self->group_name == NULL ? -1 : 0;
}

/* Returns a borrowed argument; NULL if the caller left it out, or after an error. */
static PyObject *
argument(PyObject *args, PyObject *kwargs, Py_ssize_t place, PyObject *name)
{
    if (place < PyTuple_GET_SIZE(args))
        return PyTuple_GET_ITEM(args, place);
    return kwargs == NULL ? NULL : PyDict_GetItemWithError(kwargs, name);
}

/* Returns whether a weak reference refers to an object, which the caller holds. */
static int
refers_to(PyObject *reference, PyObject *object)
{
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *referent;
    if (PyWeakref_GetRef(reference, &referent) != 1)
        return 0;
    Py_DECREF(referent);
#else
    PyObject *referent = PyWeakref_GetObject(reference);
#endif
    return referent == object;
}

/* Returns the record of a process group; NULL if it is not known, or after an error. */
static GroupFields *
known_group(RecordedFunction *self, PyObject *process_group)
{
    PyObject *key = PyLong_FromVoidPtr(process_group);
    if (key == NULL)
        return NULL;
    PyObject *known = PyDict_GetItemWithError(self->recorder->known_groups, key);
    Py_DECREF(key);
    if (known == NULL || !PyObject_TypeCheck(known, &GroupFields_Type))
        return NULL;
    GroupFields *group = (GroupFields *)known;
    if (group->reference == NULL || !PyWeakref_Check(group->reference))
        return NULL;
    return refers_to(group->reference, process_group) ? (GroupFields *)Py_NewRef(known) : NULL;
}

/* Reads bytes and data type of a plain dense tensor. Returns 0 for any other value or an error. */
static int
read_payload(RecordedFunction *self, PyObject *tensor, long long *num_bytes, PyObject **dtype)
{
    if ((PyObject *)Py_TYPE(tensor) != self->tensor_type)
        return 0;
    PyObject *is_sparse = PyObject_GetAttr(tensor, s_is_sparse);
    Py_XDECREF(is_sparse);
    if (is_sparse != Py_False)
        return 0;
    PyObject *size = PyObject_GetAttr(tensor, s_nbytes);
    if (size == NULL)
        return 0;
    *num_bytes = PyLong_AsLongLong(size);
    Py_DECREF(size);
    if (*num_bytes == -1 && PyErr_Occurred())
        return 0;
    *dtype = PyObject_GetAttr(tensor, s_dtype);
    return *dtype != NULL;
}

/* Returns whether a function is a hook that is off. Python code decides whether it is called again. */
static int
is_off(PyObject *function)
{
    return function != NULL && PyObject_TypeCheck(function, &Hook_Type) &&
           ((Hook *)function)->is_off;
}

/* Returns the clock of the phases, borrowed, or NULL if only Python code can read the same clock. It
 * may end as soon as Python code runs. */
static PhaseClock *
phase_clock(RecorderFields *recorder)
{
    PyObject *timer = recorder->phase_timer;
    if (timer == NULL || !PyObject_TypeCheck(timer, &PhaseClock_Type) ||
        ((PhaseClock *)timer)->now != NULL)
        return NULL;
    return (PhaseClock *)timer;
}

/* Returns whether a call may be recorded here: calls are recorded, by the clock of the phases, and
 * outside of coalescing blocks. */
static int
is_common(RecordedFunction *self)
{
    RecorderFields *recorder = self->recorder;
    if (is_off(self->on_call) || phase_clock(recorder) == NULL)
        return 0;
    if (recorder->calls == NULL || !PyList_Check(recorder->calls) || recorder->works == NULL ||
        !PyDict_Check(recorder->works) || recorder->under_way == NULL ||
        recorder->known_groups == NULL || !PyDict_Check(recorder->known_groups))
        return 0;
    return PyObject_Size(recorder->coalescing) == 0;
}

/* Returns whether this is the training thread, or a thread of autograd, for a call on a device. */
static int
is_training_thread(RecordedFunction *self, int on_device)
{
    if (PyThread_get_thread_ident() == self->recorder->training_thread)
        return 1;
    return on_device &&
           is_attribute((PyObject *)self->recorder, s_is_training_thread, Py_True, 1);
}

/* Returns the group of a call if it is known; else NULL. */
static GroupFields *
group_of_call(RecordedFunction *self, PyObject *args, PyObject *kwargs)
{
    PyObject *process_group = argument(args, kwargs, self->group_place, self->group_name);
    PyObject *world = NULL;
    if (process_group == NULL || process_group == Py_None) {
        if (PyErr_Occurred())
            return NULL;
        process_group = world = PyObject_GetAttr(self->group_member, s_world);
        if (world == NULL)
            return NULL;
    }
    GroupFields *group = known_group(self, process_group);
    Py_XDECREF(world);
    if (group != NULL &&
        (group->rank_set == NULL ||
         !PyObject_TypeCheck(group->rank_set, &RankSetFields_Type) ||
         ((RankSetFields *)group->rank_set)->recent == NULL))
        Py_CLEAR(group);
    return group;
}

/* What marks the start and the end of a call on a device; all NULL for a call on the host. */
typedef struct {
    PyObject *events; /* the EventPool */
    PyObject *waits;  /* the StreamWaitTracker */
    PyObject *stream; /* the current stream */
    PyObject *start;  /* an event at the start of the call */
} OnDevice;

static void
clear_device(OnDevice *device)
{
    Py_CLEAR(device->events);
    Py_CLEAR(device->waits);
    Py_CLEAR(device->stream);
    Py_CLEAR(device->start);
}

/* Marks this moment on a stream by an event, which is returned. */
static PyObject *
record_event(PyObject *events, PyObject *stream)
{
    PyObject *event = PyObject_CallMethodNoArgs(events, s_take);
    PyObject *function = event == NULL ? NULL : PyObject_GetAttr(events, s_record);
    PyObject *result =
        function == NULL ? NULL : PyObject_CallFunctionObjArgs(function, event, stream, NULL);
    Py_XDECREF(function);
    if (result == NULL)
        Py_CLEAR(event);
    Py_XDECREF(result);
    return event;
}

/* Returns whether this thread's device is that of the payload and that of the events. */
static int
is_on_device(PyObject *waits, PyObject *payload)
{
    PyObject *index = PyObject_CallMethodNoArgs(payload, s_get_device);
    PyObject *expected = index == NULL ? NULL : PyObject_GetAttr(waits, s_device_index);
    PyObject *current =
        expected == NULL ? NULL : PyObject_CallMethodNoArgs(waits, s_current_device);
    int is_same = current != NULL && PyObject_RichCompareBool(index, expected, Py_EQ) == 1 &&
                  PyObject_RichCompareBool(index, current, Py_EQ) == 1;
    Py_XDECREF(index);
    Py_XDECREF(expected);
    Py_XDECREF(current);
    return is_same;
}

/* Marks the start of a call on a device. Returns 0 if Python code must record it, or after an
 * error. */
static int
begin_on_device(RecordedFunction *self, PyObject *payload, OnDevice *device)
{
    PyObject *recorder = (PyObject *)self->recorder;
    if (payload == NULL || (device->events = PyObject_GetAttr(recorder, s_events)) == NULL ||
        (device->waits = PyObject_GetAttr(recorder, s_stream_waits)) == NULL)
        return 0;
    if (!is_on_device(device->waits, payload) ||
        !is_attribute(device->events, s_disabled, Py_False, 0) ||
        !is_attribute(device->waits, s_is_capturing, Py_False, 1))
        return 0;
    device->stream = PyObject_CallMethodNoArgs(device->waits, s_current_stream);
    if (device->stream == NULL)
        return 0;
    device->start = record_event(device->events, device->stream);
    return device->start != NULL;
}

/* Begins the record of a call; NULL if Python code must record it, or after an error. */
static CollectiveCall *
begin_call(RecordedFunction *self, PyObject *args, PyObject *kwargs, OnDevice *device)
{
    if (!is_common(self))
        return NULL;
    int phase = phase_clock(self->recorder)->current;
    GroupFields *group = group_of_call(self, args, kwargs);
    if (group == NULL)
        return NULL;
    CollectiveCall *call = NULL;
    long long num_bytes = 0;
    PyObject *dtype = NULL, *payload = NULL;
    if (!is_training_thread(self, group->on_device))
        goto not_here;
    if (self->payload_place >= 0) {
        payload = argument(args, kwargs, self->payload_place, self->payload_name);
        if (payload == NULL || !read_payload(self, payload, &num_bytes, &dtype))
            goto not_here;
    }
    if (group->on_device && !begin_on_device(self, payload, device))
        goto not_here;
    call = (CollectiveCall *)CollectiveCall_Type.tp_alloc(&CollectiveCall_Type, 0);
    if (call == NULL)
        goto not_here;
    call->start_event = Py_XNewRef(device->start);
    call->op = self->op;
    call->group = (PyObject *)group;
    call->payload_bytes = num_bytes;
    call->dtype = dtype;
    call->phase = phase;
    call->timed = 1;
    RankSetFields *rank_set = (RankSetFields *)group->rank_set;
    call->sequence = ++rank_set->issued; /* before other threads see the call */
    PyObject *added = PyObject_CallMethodOneArg(rank_set->recent, s_append, (PyObject *)call);
    if (added == NULL) {
        rank_set->issued--;
        Py_DECREF(call);
        return NULL;
    }
    Py_DECREF(added);
    group->recorded++;
    return call;
not_here:
    Py_DECREF(group);
    Py_XDECREF(dtype);
    return NULL;
}

/* Adds a call whose end is known to the batch. */
static int
add_call(RecordedFunction *self, CollectiveCall *call)
{
    RecorderFields *recorder = self->recorder;
    if (PyList_Append(recorder->calls, (PyObject *)call) < 0)
        return -1;
    if (PyList_GET_SIZE(recorder->calls) < self->max_calls)
        return 0;
    PyObject *result = PyObject_CallMethodNoArgs((PyObject *)recorder, s_batch_is_full);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* Records a call whose handle has no future, after the error that it raised. Python code records
 * the wait for such a handle. */
static int
keep_handle(RecordedFunction *self, CollectiveCall *call, PyObject *work, long long started_ns)
{
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError))
        return -1;
    PyErr_Clear();
    PyObject *result = NULL, *calls = Py_BuildValue("[O]", call);
    PyObject *started = calls == NULL ? NULL : PyLong_FromLongLong(started_ns);
    if (started != NULL)
        result = PyObject_CallMethodObjArgs((PyObject *)self->recorder, s_keep_handles, calls, work,
                                            started, NULL);
    Py_XDECREF(calls);
    Py_XDECREF(started);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* Arranges that the end of an asynchronous call is recorded. `future` is a new reference. */
static int
watch_end(RecordedFunction *self, CollectiveCall *call, PyObject *work, PyObject *future)
{
    RecorderFields *recorder = self->recorder;
    int status = -1;
    PyObject *key = NULL, *reference = NULL, *entry = NULL, *result = NULL;
    CallEnd *end = NULL;
    if (PySet_Add(recorder->under_way, (PyObject *)call) < 0 ||
        (key = PyLong_FromVoidPtr(work)) == NULL ||
        (reference = PyWeakref_NewRef(work, NULL)) == NULL ||
        (entry = PyTuple_Pack(2, reference, (PyObject *)call)) == NULL ||
        PyDict_SetItem(recorder->works, key, entry) < 0 ||
        (end = PyObject_GC_New(CallEnd, &CallEnd_Type)) == NULL)
        goto done;
    end->recorder = (RecorderFields *)Py_NewRef((PyObject *)recorder);
    end->call = (CollectiveCall *)Py_NewRef((PyObject *)call);
    end->key = Py_NewRef(key);
    PyObject_GC_Track(end);
    result = PyObject_CallMethodOneArg(future, s_add_done_callback, (PyObject *)end);
    status = result == NULL ? -1 : 0;
done:
    Py_XDECREF(key);
    Py_XDECREF(reference);
    Py_XDECREF(entry);
    Py_DECREF(future);
    Py_XDECREF((PyObject *)end);
    Py_XDECREF(result);
    return status;
}

/* Returns whether a synchronous call blocks the compute stream, or -1 after an error. If it does
 * not, the call is known to be in the queue of its stream. */
static int
blocks_compute(CollectiveCall *call, OnDevice *device)
{
    PyObject *compute = PyObject_GetAttr(device->waits, s_compute);
    Py_XDECREF(compute); /* the tracker keeps it */
    if (compute == NULL || compute == device->stream)
        return compute == NULL ? -1 : 1;
    PyObject *calls = PyTuple_Pack(1, (PyObject *)call), *result = NULL;
    if (calls != NULL)
        result = PyObject_CallMethodOneArg(device->waits, s_blocks_compute, calls);
    int blocks = result == NULL ? -1 : PyObject_IsTrue(result);
    Py_XDECREF(calls);
    Py_XDECREF(result);
    return blocks;
}

/* Marks the end of a call on a device, or arranges that it is found. */
static int
end_on_device(RecordedFunction *self, CollectiveCall *call, PyObject *work, OnDevice *device,
              long long started_ns, long long ended_ns)
{
    PyObject *recorder = (PyObject *)self->recorder;
    call->start_ns = call->issued_ns = started_ns;
    if (work != NULL) {
        PyObject *result = PyObject_CallMethodObjArgs(recorder, s_find_end_on_device,
                                                      (PyObject *)call, work, NULL);
        Py_XDECREF(result);
        if (result == NULL)
            return -1;
    }
    else {
        int blocks = blocks_compute(call, device);
        PyObject *event = blocks < 0 ? NULL : record_event(device->events, device->stream);
        if (event == NULL)
            return -1;
        if (blocks)
            call->issued_ns = ended_ns;
        Py_XSETREF(call->end_event, event);
        call->end_ns = ended_ns;
    }
    return PyObject_SetAttr(recorder, s_sees_device, Py_True);
}

/* Records that a call has returned a handle, or has ended. */
static int
end_call(RecordedFunction *self, CollectiveCall *call, PyObject *work, OnDevice *device,
         long long started_ns, long long ended_ns)
{
    PyObject *get_future = NULL;
    if (work != Py_None && (get_future = PyObject_GetAttr(work, s_get_future)) == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError))
            return -1;
        PyErr_Clear();
    }
    if (device->start != NULL) {
        int status = end_on_device(self, call, get_future == NULL ? NULL : work, device,
                                   started_ns, ended_ns);
        Py_XDECREF(get_future);
        return status < 0 ? -1 : add_call(self, call);
    }
    call->start_ns = started_ns;
    call->issued_ns = ended_ns;
    if (get_future == NULL) {
        call->end_ns = ended_ns;
        return add_call(self, call);
    }
    PyObject *future = PyObject_CallNoArgs(get_future);
    Py_DECREF(get_future);
    if (future == NULL)
        return keep_handle(self, call, work, started_ns);
    return watch_end(self, call, work, future) < 0 ? -1 : add_call(self, call);
}

/* Ends a report to Python code, which fails open itself. Releases the result and the exception that
 * was reported, which is raised again if `raises`. Returns -1 if an exception is set then: this one,
 * or that of Ctrl-C meanwhile, with this one as its context. */
static int
end_report(PyObject *result, PyObject *error, int raises)
{
    Py_XDECREF(result);
    int is_replaced = is_interrupt();
    if (!is_replaced)
        PyErr_Clear();
    if (!raises) {
        Py_DECREF(error);
        return is_replaced ? -1 : 0;
    }
    raise_again(is_replaced ? take_interrupt(error) : error);
    return -1;
}

/* Passes the current exception to Python code, which gives up the call. The exception is that of the
 * call, which is set again, or one of ours. Returns -1 if one is set then. */
static int
report_failure(RecordedFunction *self, CollectiveCall *call, long long started_ns,
               long long ended_ns, int is_ours)
{
    PyObject *error = take_error();
    PyObject *result = PyObject_CallFunction(self->on_failure, "OLLOO", (PyObject *)call,
                                             started_ns, ended_ns, error,
                                             is_ours ? Py_True : Py_False);
    return end_report(result, error, !is_ours);
}

static PyObject *
record(RecordedFunction *self, PyObject *args, PyObject *kwargs)
{
    WrapperState *state = self->state;
    if (!state->hooks.is_open || is_inside(state))
        return PyObject_Call(self->original, args, kwargs);
    long long entered_ns = now_ns();
    OnDevice device = {NULL, NULL, NULL, NULL};
    CollectiveCall *call = begin_call(self, args, kwargs, &device);
    if (call == NULL) {
        clear_device(&device);
        if (is_interrupt())
            return NULL;
        PyErr_Clear(); /* Python code will raise it again where it is counted */
        PyObject *result, *both = PyTuple_Pack(2, args, kwargs == NULL ? Py_None : kwargs);
        if (both == NULL)
            return NULL;
        result = PyObject_Call(self->in_python, both, NULL);
        Py_DECREF(both);
        return result;
    }
    set_inside(state, 1);
    long long started_ns = now_ns();
    PyObject *work = PyObject_Call(self->original, args, kwargs);
    long long ended_ns = now_ns();
    set_inside(state, 0);
    if (work == NULL)
        report_failure(self, call, started_ns, ended_ns, 0);
    else if (end_call(self, call, work, &device, started_ns, ended_ns) < 0 &&
             report_failure(self, call, started_ns, ended_ns, 1) < 0)
        Py_CLEAR(work);
    Py_DECREF(call);
    clear_device(&device);
    state->hooks.cost_ns += now_ns() - ended_ns + started_ns - entered_ns;
    return work;
}

static PyObject *
RecordedFunction_vectorcall(RecordedFunction *self, PyObject *const *args, size_t nargsf,
                            PyObject *names)
{
    if (!are_arguments(self->state, args, nargsf, names))
        return NULL;
    return record(self, args[0], args[1]);
}

static int
RecordedFunction_traverse(RecordedFunction *self, visitproc visit, void *arg)
{
    Py_VISIT(self->state);
    Py_VISIT(self->recorder);
    Py_VISIT(self->original);
    Py_VISIT(self->in_python);
    Py_VISIT(self->on_call);
    Py_VISIT(self->on_failure);
    Py_VISIT(self->tensor_type);
    Py_VISIT(self->group_member);
    return 0;
}

static int
RecordedFunction_clear(RecordedFunction *self)
{
    Py_CLEAR(self->state);
    Py_CLEAR(self->recorder);
    Py_CLEAR(self->original);
    Py_CLEAR(self->in_python);
    Py_CLEAR(self->on_call);
    Py_CLEAR(self->on_failure);
    Py_CLEAR(self->tensor_type);
    Py_CLEAR(self->group_member);
    Py_CLEAR(self->payload_name);
    Py_CLEAR(self->group_name);
    return 0;
}

static void
RecordedFunction_dealloc(RecordedFunction *self)
{
    PyObject_GC_UnTrack(self);
    RecordedFunction_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject RecordedFunction_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "zerowatch.runtime.common._hot_path.RecordedFunction",
    .tp_basicsize = sizeof(RecordedFunction),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(RecordedFunction, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)RecordedFunction_init,
    .tp_dealloc = (destructor)RecordedFunction_dealloc,
    .tp_traverse = (traverseproc)RecordedFunction_traverse,
    .tp_clear = (inquiry)RecordedFunction_clear,
};

/* ---- RecordedWait: see hot_path.py ---- */

typedef struct {
    PyObject_HEAD
    WrapperState *state;
    RecorderFields *recorder;
    PyObject *original, *in_python, *on_wait_start, *on_wait_end, *on_error, *stream_wait_type;
    vectorcallfunc vectorcall;
} RecordedWait;

static PyObject *RecordedWait_vectorcall(RecordedWait *, PyObject *const *, size_t, PyObject *);

static int
RecordedWait_init(RecordedWait *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"state",         "recorder",    "original", "in_python",
                            "on_wait_start", "on_wait_end", "on_error", "stream_wait_type",
                            NULL};
    PyObject *state, *recorder, *original, *in_python, *on_wait_start, *on_wait_end, *on_error,
        *stream_wait_type;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!OOOOOO", names, &WrapperState_Type, &state,
                                     &RecorderFields_Type, &recorder, &original, &in_python,
                                     &on_wait_start, &on_wait_end, &on_error, &stream_wait_type))
        return -1;
    Py_XSETREF(self->state, (WrapperState *)Py_NewRef(state));
    Py_XSETREF(self->recorder, (RecorderFields *)Py_NewRef(recorder));
    set_object(&self->original, original);
    set_object(&self->in_python, in_python);
    set_object(&self->on_wait_start, on_wait_start);
    set_object(&self->on_wait_end, on_wait_end);
    set_object(&self->on_error, on_error);
    set_object(&self->stream_wait_type, stream_wait_type);
    self->vectorcall = (vectorcallfunc)RecordedWait_vectorcall;
    return 0;
}

/* Takes the entry of a handle from `works`, so that only one thread marks its wait. Returns 0 if
 * Python code must record the wait, or after an error; 1 with a new reference to the entry, or with
 * NULL if no call of this handle was recorded. */
static int
take_entry(RecordedWait *self, PyObject *work, PyObject *key, PyObject **taken)
{
    RecorderFields *recorder = self->recorder;
    if (is_off(self->on_wait_start) || recorder->works == NULL ||
        !PyDict_Check(recorder->works) || recorder->messages == NULL ||
        !PyDict_Check(recorder->messages) || PyDict_Contains(recorder->messages, key) != 0)
        return 0;
    PyObject *entry = PyDict_GetItemWithError(recorder->works, key);
    if (entry == NULL)
        return !PyErr_Occurred();
    PyObject *reference = PyTuple_GET_ITEM(entry, 0);
    if (!PyObject_TypeCheck(PyTuple_GET_ITEM(entry, 1), &CollectiveCall_Type) ||
        !PyWeakref_Check(reference) || !refers_to(reference, work))
        return 0;
    *taken = Py_NewRef(entry);
    if (PyDict_DelItem(recorder->works, key) == 0)
        return 1;
    Py_CLEAR(*taken);
    return 0;
}

/* Gives an entry back, so that Python code finds it. An exception stays set. */
static void
give_back(RecordedWait *self, PyObject *key, PyObject *entry)
{
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    if (PyDict_SetItem(self->recorder->works, key, entry) < 0)
        PyErr_Clear();
    PyErr_Restore(type, error, traceback);
}

/* Marks where the compute stream begins to wait for a call. Returns 0 if Python code must, or after
 * an error. */
static int
mark_wait(RecordedWait *self, CollectiveCall *call, OnDevice *device)
{
    PyObject *recorder = (PyObject *)self->recorder;
    if (call->settled || (call->stream_wait != NULL && call->stream_wait != Py_None) ||
        (device->events = PyObject_GetAttr(recorder, s_events)) == NULL ||
        (device->waits = PyObject_GetAttr(recorder, s_stream_waits)) == NULL ||
        !is_attribute(device->waits, s_is_capturing, Py_False, 1) ||
        (device->stream = PyObject_CallMethodNoArgs(device->waits, s_current_stream)) == NULL ||
        !is_attribute(device->waits, s_compute, device->stream, 0) ||
        (device->start = record_event(device->events, device->stream)) == NULL)
        return 0;
    PyObject *wait = PyObject_CallFunction(self->stream_wait_type, "Oi", device->start, 1);
    if (wait == NULL)
        return 0;
    Py_XSETREF(call->stream_wait, wait);
    return 1;
}

/* Records that this thread begins to wait. Returns 0 if Python code must, or after an error; 1 with
 * a new reference to the call, or with NULL if no call of this handle was recorded. */
static int
begin_wait(RecordedWait *self, PyObject *work, CollectiveCall **found, OnDevice *device)
{
    RecorderFields *recorder = self->recorder;
    PhaseClock *clock = phase_clock(recorder);
    if (clock == NULL)
        return 0;
    int phase = clock->current;
    PyObject *entry = NULL, *key = PyLong_FromVoidPtr(work);
    int is_here = key != NULL && take_entry(self, work, key, &entry);
    if (entry != NULL) {
        CollectiveCall *call = (CollectiveCall *)PyTuple_GET_ITEM(entry, 1);
        if (call->start_event != NULL && call->start_event != Py_None) {
            is_here = mark_wait(self, call, device);
            if (is_here)
                call->wait_phase = phase;
        }
        else if (PyThread_get_thread_ident() == recorder->training_thread && !call->end_ns) {
            call->wait_phase = phase;
            call->wait_ns = now_ns();
        }
        if (is_here)
            *found = (CollectiveCall *)Py_NewRef((PyObject *)call);
        else
            give_back(self, key, entry);
        Py_DECREF(entry);
    }
    Py_XDECREF(key);
    return is_here;
}

/* Marks the end of a call that nothing else marks. Returns -1 if an interrupt is set then. */
static int
end_wait(RecordedWait *self, PyObject *work, CollectiveCall *call, OnDevice *device)
{
    if (!call->is_bound || call->settled)
        return 0;
    PyObject *event = NULL;
    if (device->stream != NULL && is_attribute(device->waits, s_is_capturing, Py_False, 1))
        event = record_event(device->events, device->stream);
    if (event != NULL) {
        Py_XSETREF(call->end_event, event);
        return 0;
    }
    if (is_interrupt())
        return -1;
    PyErr_Clear(); /* Python code will raise it again where it is counted */
    PyObject *result =
        PyObject_CallFunctionObjArgs(self->on_wait_end, work, (PyObject *)call, NULL);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* Tells Python code that a call has raised the current exception, which is raised again. */
static void
report_error(RecordedWait *self, CollectiveCall *call)
{
    PyObject *error = take_error();
    PyObject *result =
        PyObject_CallFunctionObjArgs(self->on_error, (PyObject *)call, error, NULL);
    end_report(result, error, 1);
}

static PyObject *
record_wait(RecordedWait *self, PyObject *args, PyObject *kwargs)
{
    WrapperState *state = self->state;
    if (!state->hooks.is_open || is_inside(state) || PyTuple_GET_SIZE(args) == 0)
        return PyObject_Call(self->original, args, kwargs);
    long long entered_ns = now_ns();
    PyObject *work = PyTuple_GET_ITEM(args, 0);
    OnDevice device = {NULL, NULL, NULL, NULL};
    CollectiveCall *call = NULL;
    if (!begin_wait(self, work, &call, &device)) {
        clear_device(&device);
        if (is_interrupt())
            return NULL;
        PyErr_Clear(); /* Python code will raise it again where it is counted */
        return PyObject_Call(self->in_python, args, kwargs);
    }
    state->hooks.cost_ns += now_ns() - entered_ns;
    PyObject *result = PyObject_Call(self->original, args, kwargs);
    long long ended_ns = now_ns();
    if (call != NULL && result != NULL && end_wait(self, work, call, &device) < 0)
        Py_CLEAR(result);
    else if (call != NULL && result == NULL && PyErr_ExceptionMatches(PyExc_RuntimeError))
        report_error(self, call);
    Py_XDECREF(call);
    clear_device(&device);
    state->hooks.cost_ns += now_ns() - ended_ns;
    return result;
}

static PyObject *
RecordedWait_vectorcall(RecordedWait *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    if (!are_arguments(self->state, args, nargsf, names))
        return NULL;
    return record_wait(self, args[0], args[1]);
}

static int
RecordedWait_traverse(RecordedWait *self, visitproc visit, void *arg)
{
    Py_VISIT(self->state);
    Py_VISIT(self->recorder);
    Py_VISIT(self->original);
    Py_VISIT(self->in_python);
    Py_VISIT(self->on_wait_start);
    Py_VISIT(self->on_wait_end);
    Py_VISIT(self->on_error);
    Py_VISIT(self->stream_wait_type);
    return 0;
}

static int
RecordedWait_clear(RecordedWait *self)
{
    Py_CLEAR(self->state);
    Py_CLEAR(self->recorder);
    Py_CLEAR(self->original);
    Py_CLEAR(self->in_python);
    Py_CLEAR(self->on_wait_start);
    Py_CLEAR(self->on_wait_end);
    Py_CLEAR(self->on_error);
    Py_CLEAR(self->stream_wait_type);
    return 0;
}

static void
RecordedWait_dealloc(RecordedWait *self)
{
    PyObject_GC_UnTrack(self);
    RecordedWait_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject RecordedWait_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "zerowatch.runtime.common._hot_path.RecordedWait",
    .tp_basicsize = sizeof(RecordedWait),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(RecordedWait, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)RecordedWait_init,
    .tp_dealloc = (destructor)RecordedWait_dealloc,
    .tp_traverse = (traverseproc)RecordedWait_traverse,
    .tp_clear = (inquiry)RecordedWait_clear,
};

/* ---- ScalarReader: see hot_path.py ---- */

/* No tensor has more bytes; most addresses are higher. */
#define MAX_OFFSET ((size_t)1 << 44)

/* What is asked of a tensor. The descriptors of its class are kept, so that with cold caches no name
 * is searched for. */
enum { IS_CPU, DTYPE, IS_NEG, NUMEL, DATA_PTR, STORAGE_OFFSET, NUM_ASKED };
static PyObject **const asked_names[NUM_ASKED] = {
    &s_is_cpu, &s_dtype, &s_is_neg, &s_numel, &s_data_ptr, &s_storage_offset,
};

typedef struct {
    PyObject_HEAD
    PyObject *tensor_type, *float32, *float64;
    PyObject *asked[NUM_ASKED];
} ScalarReader;

static int
ScalarReader_init(ScalarReader *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tensor_type", "float32", "float64", NULL};
    PyObject *tensor_type, *float32, *float64;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO", names, &tensor_type, &float32, &float64))
        return -1;
    set_object(&self->tensor_type, tensor_type);
    set_object(&self->float32, float32);
    set_object(&self->float64, float64);
    for (int i = 0; i < NUM_ASKED; i++) {
        PyObject *found = PyObject_GetAttr(tensor_type, *asked_names[i]);
        if (found == NULL)
            return -1;
        Py_XSETREF(self->asked[i], found);
    }
    return 0;
}

/* Returns an attribute of a tensor, or the result of one of its methods. */
static PyObject *
ask(ScalarReader *self, PyObject *tensor, int what)
{
    PyObject *asked = self->asked[what];
    if (Py_IS_TYPE(asked, &PyGetSetDescr_Type))
        return Py_TYPE(asked)->tp_descr_get(asked, tensor, self->tensor_type);
    return PyObject_CallOneArg(asked, tensor);
}

/* Whether the answer is this singleton. */
static int
is_answer(ScalarReader *self, PyObject *tensor, int what, PyObject *expected)
{
    PyObject *found = ask(self, tensor, what);
    Py_XDECREF(found);
    return found == expected;
}

/* Asks for an integer; -1 after an error. */
static long long
ask_integer(ScalarReader *self, PyObject *tensor, int what)
{
    PyObject *number = ask(self, tensor, what);
    long long value = number == NULL ? -1 : PyLong_AsLongLong(number);
    Py_XDECREF(number);
    return value;
}

static PyObject *
read_scalar(ScalarReader *self, PyObject *tensor)
{
    if ((PyObject *)Py_TYPE(tensor) != self->tensor_type ||
        !is_answer(self, tensor, IS_CPU, Py_True))
        return NULL;
    PyObject *dtype = ask(self, tensor, DTYPE);
    Py_XDECREF(dtype); /* torch keeps its data types */
    if (dtype == NULL || (dtype != self->float32 && dtype != self->float64) ||
        !is_answer(self, tensor, IS_NEG, Py_False) || ask_integer(self, tensor, NUMEL) != 1)
        return NULL;
    PyObject *address = ask(self, tensor, DATA_PTR);
    void *data = address == NULL ? NULL : PyLong_AsVoidPtr(address);
    Py_XDECREF(address);
    if (data == NULL)
        return NULL;
    /* Without memory, as after a resize of the storage to 0, it is the offset of the tensor. */
    if ((size_t)data <= MAX_OFFSET) {
        long long offset = ask_integer(self, tensor, STORAGE_OFFSET);
        size_t item = dtype == self->float32 ? sizeof(float) : sizeof(double);
        if (offset < 0 || (size_t)data == (size_t)offset * item)
            return NULL;
    }
    return PyFloat_FromDouble(dtype == self->float32 ? *(float *)data : *(double *)data);
}

static PyObject *
ScalarReader_call(ScalarReader *self, PyObject *args, PyObject *Py_UNUSED(names))
{
    PyObject *tensor, *found;
    if (!PyArg_UnpackTuple(args, "read", 1, 1, &tensor))
        return NULL;
    if ((found = read_scalar(self, tensor)) != NULL)
        return found;
    if (is_interrupt())
        return NULL;
    PyErr_Clear(); /* such as that of a sparse tensor, which has no address */
    Py_RETURN_NONE;
}

static void
ScalarReader_dealloc(ScalarReader *self)
{
    Py_CLEAR(self->tensor_type);
    Py_CLEAR(self->float32);
    Py_CLEAR(self->float64);
    for (int i = 0; i < NUM_ASKED; i++)
        Py_CLEAR(self->asked[i]);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject ScalarReader_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "zerowatch.runtime.common._hot_path.ScalarReader",
    .tp_basicsize = sizeof(ScalarReader),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)ScalarReader_init,
    .tp_call = (ternaryfunc)ScalarReader_call,
    .tp_dealloc = (destructor)ScalarReader_dealloc,
};

/* ---- ShapeReader: see hot_path.py and instrumentation/batch_shape.py ---- */

#define UNKNOWN -1
/* In deeper mappings, Python code searches for tensors: a mapping may contain itself. */
#define MAX_DEPTH 8

/* The last two are for the search: the first two dimensions of the first tensor that holds the
 * tokens if there are no features. */
typedef struct {
    long long samples, elements, tokens, length, doubtful[2];
    int has_features;
} BatchSize;

typedef struct {
    PyObject_HEAD
    PyObject *tensor_type, *bool_type, *token_names, *vector_names, *doubtful_parts, *shape_type,
        *in_python;
    PyObject *last; /* the last shape that was returned, of this size */
    BatchSize last_size;
} ShapeReader;

static int
ShapeReader_init(ShapeReader *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tensor_type", "bool_type", "token_names", "vector_names",
                            "doubtful_parts", "shape_type", "in_python", NULL};
    PyObject *tensor_type, *bool_type, *token_names, *vector_names, *doubtful_parts, *shape_type,
        *in_python;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OO!O!O!OO", names, &PyType_Type, &tensor_type,
                                     &bool_type, &PyFrozenSet_Type, &token_names,
                                     &PyFrozenSet_Type, &vector_names, &PyTuple_Type,
                                     &doubtful_parts, &shape_type, &in_python))
        return -1;
    set_object(&self->tensor_type, tensor_type);
    set_object(&self->bool_type, bool_type);
    set_object(&self->token_names, token_names);
    set_object(&self->vector_names, vector_names);
    set_object(&self->doubtful_parts, doubtful_parts);
    set_object(&self->shape_type, shape_type);
    set_object(&self->in_python, in_python);
    Py_CLEAR(self->last);
    return 0;
}

enum { BOOLS, FLOATS, INTEGERS };

/* Returns what a tensor holds; -1 after an error. */
static int
kind_of_elements(ShapeReader *self, PyObject *tensor)
{
    PyObject *dtype = PyObject_GetAttr(tensor, s_dtype);
    if (dtype == NULL)
        return -1;
    int kind = INTEGERS;
    if (dtype == self->bool_type)
        kind = BOOLS;
    else if (is_attribute(dtype, s_is_floating_point, Py_True, 0))
        kind = FLOATS;
    Py_DECREF(dtype);
    return PyErr_Occurred() ? -1 : kind;
}

/* Whether a name has one of the doubtful parts; -1 after an error. */
static int
is_doubtful(ShapeReader *self, PyObject *name)
{
    int found = 0;
    for (Py_ssize_t i = 0; !found && i < PyTuple_GET_SIZE(self->doubtful_parts); i++)
        found = PyUnicode_Contains(name, PyTuple_GET_ITEM(self->doubtful_parts, i));
    return found;
}

/* Reads the first two dimensions and the number of elements. Returns the number of dimensions; -1
 * if Python code must read the batch, or after an error. */
static Py_ssize_t
read_dimensions(PyObject *tensor, long long dimensions[2], long long *elements)
{
    dimensions[0] = dimensions[1] = 0;
    *elements = 1;
    PyObject *shape = PyObject_GetAttr(tensor, s_shape);
    if (shape == NULL || !PyTuple_Check(shape)) {
        Py_XDECREF(shape);
        return -1;
    }
    Py_ssize_t length = PyTuple_GET_SIZE(shape);
    for (Py_ssize_t i = 0; i < length; i++) {
        PyObject *dimension = PyTuple_GET_ITEM(shape, i);
        long long number = PyLong_CheckExact(dimension) ? PyLong_AsLongLong(dimension) : -1;
        if (number < 0) {
            Py_DECREF(shape);
            return -1;
        }
        *elements *= number; /* torch refuses shapes with which this would overflow */
        if (i < 2)
            dimensions[i] = number;
    }
    Py_DECREF(shape);
    return length;
}

/* The tokens are those of a tensor with these first two dimensions. */
static void
set_tokens(BatchSize *size, const long long dimensions[2])
{
    size->samples = dimensions[0];
    size->length = dimensions[1];
    size->tokens = dimensions[0] * dimensions[1];
}

/* Adds a tensor to the size. Returns whether its name says that it holds the tokens; -1 if Python
 * code must read the batch, or after an error. */
static int
read_tensor(ShapeReader *self, PyObject *name, PyObject *tensor, BatchSize *size)
{
    long long dimensions[2], elements;
    Py_ssize_t length = read_dimensions(tensor, dimensions, &elements);
    if (length <= 0)
        return (int)length;
    if (size->samples == UNKNOWN) {
        size->samples = dimensions[0];
        size->elements = elements;
    }
    if (length == 1)
        return 0;
    int is_named = name == NULL || length != 2 ? 0 : PySet_Contains(self->token_names, name);
    int has_vectors = name == NULL || is_named ? 0 : PySet_Contains(self->vector_names, name);
    if (is_named < 0 || has_vectors < 0)
        return -1;
    if (has_vectors) {
        if (length == 3)
            set_tokens(size, dimensions);
        return 0;
    }
    int kind = is_named ? INTEGERS : BOOLS;
    if (!is_named && size->tokens == UNKNOWN && (kind = kind_of_elements(self, tensor)) < 0)
        return -1;
    if (kind == BOOLS || (kind == INTEGERS && length != 2))
        return 0;
    int in_doubt = is_named || name == NULL ? 0 : is_doubtful(self, name);
    if (in_doubt < 0)
        return -1;
    if (kind == FLOATS) {
        size->has_features |= !in_doubt;
    } else if (!in_doubt) {
        set_tokens(size, dimensions);
    } else if (size->doubtful[0] == UNKNOWN) {
        size->doubtful[0] = dimensions[0];
        size->doubtful[1] = dimensions[1];
    }
    return is_named;
}

static int read_value(ShapeReader *, PyObject *, PyObject *, BatchSize *, int);

/* Adds what is in a mapping. Returns 0, or -1 as read_tensor. */
static int
read_mapping(ShapeReader *self, PyObject *mapping, BatchSize *size, int depth)
{
    PyObject *key, *value;
    Py_ssize_t place = 0;
    int is_named = depth > MAX_DEPTH ? -1 : 0; /* a name ends the search in this mapping */
    while (is_named == 0 && PyDict_Next(mapping, &place, &key, &value)) {
        Py_INCREF(key); /* another thread may change the mapping */
        Py_INCREF(value);
        is_named = PyUnicode_CheckExact(key) ? read_value(self, key, value, size, depth + 1) : -1;
        Py_DECREF(key);
        Py_DECREF(value);
    }
    return is_named < 0 ? -1 : 0;
}

/* Adds what is in a value, as read_tensor. */
static int
read_value(ShapeReader *self, PyObject *name, PyObject *value, BatchSize *size, int depth)
{
    if ((PyObject *)Py_TYPE(value) == self->tensor_type)
        return read_tensor(self, name, value, size);
    if (PyDict_CheckExact(value))
        return read_mapping(self, value, size, depth);
    /* What is neither a tensor nor a dict is left out; what may be one is for Python code. */
    int is_plain = value == Py_None || PyUnicode_CheckExact(value) || PyLong_CheckExact(value) ||
                   PyFloat_CheckExact(value) || PyBool_Check(value) || PyList_CheckExact(value) ||
                   PyTuple_CheckExact(value);
    return is_plain ? 0 : -1;
}

static int
is_sequence(PyObject *value)
{
    return PyList_CheckExact(value) || PyTuple_CheckExact(value);
}

/* Reads the size of images with as many targets. Returns whether the arguments are that; -1 as
 * read_tensor. */
static int
read_images(ShapeReader *self, PyObject *args, BatchSize *size)
{
    if (PyTuple_GET_SIZE(args) < 2)
        return 0;
    PyObject *images = PyTuple_GET_ITEM(args, 0), *targets = PyTuple_GET_ITEM(args, 1);
    if (!is_sequence(images) || !is_sequence(targets))
        return 0;
    Py_ssize_t number = PySequence_Fast_GET_SIZE(images), i = 0;
    if (number != PySequence_Fast_GET_SIZE(targets))
        return 0;
    long long all_elements = 0;
    /* Another thread may change the lists, so their sizes are read each time. */
    for (; i < PySequence_Fast_GET_SIZE(images) && i < PySequence_Fast_GET_SIZE(targets); i++) {
        PyObject *image = PySequence_Fast_GET_ITEM(images, i);
        if ((PyObject *)Py_TYPE(image) != self->tensor_type ||
            !PyDict_CheckExact(PySequence_Fast_GET_ITEM(targets, i)))
            return 0;
        long long dimensions[2], elements;
        Py_INCREF(image);
        Py_ssize_t length = read_dimensions(image, dimensions, &elements);
        Py_DECREF(image);
        if (length != 3)
            return length < 0 ? -1 : 0;
        all_elements += elements;
    }
    if (i == 0 || i != number)
        return 0;
    size->samples = number;
    size->elements = all_elements;
    return 1;
}

static int
read_arguments(ShapeReader *self, PyObject *args, PyObject *kwargs, BatchSize *size)
{
    if (read_mapping(self, kwargs, size, 0) < 0)
        return -1;
    int are_images = size->tokens == UNKNOWN ? read_images(self, args, size) : 0;
    if (are_images)
        return are_images < 0 ? -1 : 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args) && size->tokens == UNKNOWN; i++) {
        PyObject *value = PyTuple_GET_ITEM(args, i);
        if (!is_sequence(value)) {
            if (read_value(self, NULL, value, size, 0) < 0)
                return -1;
            continue;
        }
        for (Py_ssize_t j = 0; j < PySequence_Fast_GET_SIZE(value); j++) {
            PyObject *inner = Py_NewRef(PySequence_Fast_GET_ITEM(value, j));
            int is_read = read_value(self, NULL, inner, size, 0) >= 0;
            Py_DECREF(inner);
            if (!is_read)
                return -1;
        }
    }
    if (size->tokens == UNKNOWN && size->doubtful[0] != UNKNOWN && !size->has_features)
        set_tokens(size, size->doubtful);
    return 0;
}

static PyObject *
number_or_none(long long number)
{
    return number == UNKNOWN ? Py_NewRef(Py_None) : PyLong_FromLongLong(number);
}

/* Returns the shape of this size: the last one, if it has the same. */
static PyObject *
shape_of(ShapeReader *self, const BatchSize *size)
{
    const BatchSize *last = &self->last_size;
    if (self->last == NULL || last->samples != size->samples ||
        last->elements != size->elements || last->tokens != size->tokens ||
        last->length != size->length) {
        PyObject *made = PyObject_CallFunction(
            self->shape_type, "NNNN", number_or_none(size->samples),
            number_or_none(size->elements), number_or_none(size->tokens),
            number_or_none(size->length));
        if (made == NULL)
            return NULL;
        Py_XSETREF(self->last, made);
        self->last_size = *size;
    }
    return Py_NewRef(self->last);
}

static PyObject *
ShapeReader_call(ShapeReader *self, PyObject *both, PyObject *Py_UNUSED(names))
{
    PyObject *args, *kwargs, *found = NULL;
    if (!PyArg_UnpackTuple(both, "read", 2, 2, &args, &kwargs))
        return NULL;
    if (self->in_python == NULL) {
        PyErr_SetString(PyExc_TypeError, "ShapeReader was not initialized");
        return NULL;
    }
    BatchSize size = {UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, {UNKNOWN, UNKNOWN}, 0};
    if (PyTuple_CheckExact(args) && PyDict_CheckExact(kwargs) &&
        read_arguments(self, args, kwargs, &size) == 0)
        found = shape_of(self, &size);
    if (found != NULL || is_interrupt())
        return found;
    PyErr_Clear(); /* Python code will raise it again where it is counted */
    return PyObject_Call(self->in_python, both, NULL);
}

static void
ShapeReader_dealloc(ShapeReader *self)
{
    Py_CLEAR(self->tensor_type);
    Py_CLEAR(self->bool_type);
    Py_CLEAR(self->token_names);
    Py_CLEAR(self->vector_names);
    Py_CLEAR(self->doubtful_parts);
    Py_CLEAR(self->shape_type);
    Py_CLEAR(self->in_python);
    Py_CLEAR(self->last);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject ShapeReader_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "zerowatch.runtime.common._hot_path.ShapeReader",
    .tp_basicsize = sizeof(ShapeReader),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)ShapeReader_init,
    .tp_call = (ternaryfunc)ShapeReader_call,
    .tp_dealloc = (destructor)ShapeReader_dealloc,
};

/* ---- StepSlots: see hot_path.py ---- */

/* A slot without its checksum: 3 numbers, the flags, 3 counts, 4 values, and the phases. */
#define MAX_STEP_BYTES (3 * 8 + 4 + 7 * 8 + MAX_PHASES * 8)
#define SKIPPED 1
#define HOST_TIMES 2

/* The fields of a step and of its counts that are written. */
enum {
    STEP, ENDED_AT, GRADIENT_NORM, LEARNING_RATE, LOSS_SCALE, DEVICE_PHASES, PHASE_NS, COUNTS,
    MICRO_BATCHES, SAMPLES, TOKENS, LOSSES, IS_SKIPPED,
    NUM_FIELDS,
};
static PyObject **const field_names[NUM_FIELDS] = {
    &s_step, &s_ended_at, &s_gradient_norm, &s_learning_rate, &s_loss_scale, &s_device_phases,
    &s_phase_ns, &s_counts, &s_micro_batches, &s_samples, &s_tokens, &s_losses, &s_skipped,
};

typedef struct {
    PyObject_HEAD
    PyObject *buffer;
    PyTypeObject *owners[NUM_FIELDS]; /* the last class of which each field was read */
    Py_ssize_t places[NUM_FIELDS];    /* the byte of the field in its objects; 0 if it has none */
    Py_ssize_t first_byte, num_slots;
    int num_phases;
    unsigned long long number; /* of the last step that was written, from 1 on */
    char is_recoverable;
} StepSlots;

static int
StepSlots_init(StepSlots *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"buffer", "first_byte", "num_slots", "num_phases", NULL};
    PyObject *buffer;
    Py_ssize_t first_byte, num_slots;
    int num_phases;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Onni", names, &buffer, &first_byte, &num_slots,
                                     &num_phases))
        return -1;
    /* No sum of them overflows. */
    if (first_byte < 0 || first_byte > INT_MAX || num_slots < 1 || num_slots > INT_MAX ||
        num_phases < 0 || num_phases > MAX_PHASES) {
        PyErr_SetString(PyExc_ValueError, "expected a slot or more, and not too many phases");
        return -1;
    }
    self->first_byte = first_byte;
    self->num_slots = num_slots;
    self->num_phases = num_phases;
    set_object(&self->buffer, buffer);
    return 0;
}

/* The checksum of zlib.crc32, four bits at a time: its table fills one line of a cache. */
static unsigned int
crc32_of(const unsigned char *bytes, size_t length)
{
    static const unsigned int table[16] = {
        0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4,
        0x4db26158, 0x5005713c, 0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c,
        0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c,
    };
    unsigned int sum = ~0u;
    for (size_t i = 0; i < length; i++) {
        sum = (sum >> 4) ^ table[(sum ^ bytes[i]) & 15];
        sum = (sum >> 4) ^ table[(sum ^ bytes[i] >> 4) & 15];
    }
    return ~sum;
}

static unsigned char *
append(unsigned char *end, const void *value, size_t length)
{
    memcpy(end, value, length);
    return end + length;
}

/* Appends an integer. Takes the reference. Returns NULL after an error. */
static unsigned char *
append_integer(unsigned char *end, PyObject *value)
{
    if (value == NULL)
        return NULL;
    long long number = PyLong_AsLongLong(value);
    Py_DECREF(value);
    return number == -1 && PyErr_Occurred() ? NULL : append(end, &number, sizeof(number));
}

/* Appends a count; None is an unknown one. Takes the reference. Returns NULL after an error. */
static unsigned char *
append_count(unsigned char *end, PyObject *value)
{
    if (value != Py_None)
        return append_integer(end, value);
    const long long unknown = -1;
    Py_DECREF(value);
    return append(end, &unknown, sizeof(unknown));
}

/* Appends a float; any other object is unknown, or still on a device. Takes the reference. */
static unsigned char *
append_float(unsigned char *end, PyObject *value)
{
    if (value == NULL)
        return NULL;
    double number = PyFloat_CheckExact(value) ? PyFloat_AS_DOUBLE(value) : -DBL_MAX;
    Py_DECREF(value);
    return append(end, &number, sizeof(number));
}

/* Appends the time of the end of a step. Takes the reference. */
static unsigned char *
append_time(unsigned char *end, PyObject *value)
{
    if (value == NULL)
        return NULL;
    double number = PyFloat_AsDouble(value);
    Py_DECREF(value);
    return number == -1.0 && PyErr_Occurred() ? NULL : append(end, &number, sizeof(number));
}

/* Returns the byte at which the objects of a class have a field, 0 if it is no slot of the class, or
 * -1 after an error. */
static Py_ssize_t
place_of_slot(PyTypeObject *type, PyObject *name)
{
    PyObject *found = PyObject_GetAttr((PyObject *)type, name);
    if (found == NULL)
        return -1;
    PyMemberDescrObject *member = (PyMemberDescrObject *)found;
    int is_slot = Py_IS_TYPE(found, &PyMemberDescr_Type) && PyDescr_TYPE(member) == type &&
                  member->d_member->type == T_OBJECT_EX;
    Py_ssize_t place = is_slot ? member->d_member->offset : 0;
    Py_DECREF(found);
    return place;
}

/* Notes where the objects of a class with __slots__ have a field. Returns 0, or -1 if it has none. */
static int
find_place(StepSlots *self, PyTypeObject *type, int field)
{
    Py_ssize_t place = place_of_slot(type, *field_names[field]);
    if (place < 0)
        return -1;
    self->places[field] = place;
    Py_XSETREF(self->owners[field], (PyTypeObject *)Py_NewRef((PyObject *)type));
    return 0;
}

/* Returns a new reference to a field, without a search for its name if it is a slot. With cold
 * caches, the searches would take longer than all the rest of the writing. */
static PyObject *
read_field(StepSlots *self, PyObject *object, int field)
{
    PyTypeObject *type = Py_TYPE(object);
    if (self->owners[field] != type && find_place(self, type, field) < 0)
        PyErr_Clear(); /* an object may have fields that its class lacks */
    if (self->owners[field] == type && self->places[field] > 0) {
        PyObject *value = *(PyObject **)((char *)object + self->places[field]);
        if (value != NULL)
            return Py_NewRef(value);
    }
    return PyObject_GetAttr(object, *field_names[field]);
}

/* Returns a new reference to the loss of a step, or to None while that of a part is unknown. */
static PyObject *
loss_of(StepSlots *self, PyObject *counts)
{
    PyObject *losses = read_field(self, counts, LOSSES);
    if (losses == NULL || !PyList_Check(losses)) {
        if (losses != NULL)
            PyErr_SetString(PyExc_TypeError, "the losses of a step are no list");
        Py_XDECREF(losses);
        return NULL;
    }
    PyObject *loss = NULL;
    int is_known = 1;
    if (PyList_GET_SIZE(losses) == 1)
        loss = Py_NewRef(PyList_GET_ITEM(losses, 0));
    for (Py_ssize_t i = 0; loss == NULL && i < PyList_GET_SIZE(losses); i++)
        is_known = is_known && PyFloat_CheckExact(PyList_GET_ITEM(losses, i));
    if (loss == NULL)
        loss = is_known ? PyObject_CallMethodNoArgs(counts, s_loss) : Py_NewRef(Py_None);
    Py_DECREF(losses);
    return loss;
}

/* Returns the flags of a step, or -1. */
static long
flags_of(StepSlots *self, PyObject *step, PyObject *counts)
{
    PyObject *skipped = read_field(self, counts, IS_SKIPPED);
    int is_skipped = skipped == NULL ? -1 : PyObject_IsTrue(skipped);
    Py_XDECREF(skipped);
    PyObject *device_phases = is_skipped < 0 ? NULL : read_field(self, step, DEVICE_PHASES);
    Py_XDECREF(device_phases); /* only compared */
    if (device_phases == NULL)
        return -1;
    return SKIPPED * is_skipped | HOST_TIMES * (device_phases != Py_None);
}

static unsigned char *
append_phases(StepSlots *self, unsigned char *end, PyObject *step)
{
    int num_phases = self->num_phases;
    PyObject *times = read_field(self, step, PHASE_NS);
    if (times == NULL)
        return NULL;
    if (!PyList_Check(times) || PyList_GET_SIZE(times) != num_phases) {
        PyErr_Format(PyExc_ValueError, "expected a list of the times of %d phases", num_phases);
        end = NULL;
    }
    for (int i = 0; end != NULL && i < num_phases; i++)
        end = append_integer(end, Py_NewRef(PyList_GET_ITEM(times, i)));
    Py_DECREF(times);
    return end;
}

/* Writes all of a step but its checksum; returns the end, or NULL. */
static unsigned char *
append_step(StepSlots *self, unsigned char *end, PyObject *step, PyObject *counts)
{
    long flags = flags_of(self, step, counts);
    if (flags < 0)
        return NULL;
    unsigned int bits = (unsigned int)flags;
    end = append(end, &self->number, sizeof(self->number));
    if ((end = append_integer(end, read_field(self, step, STEP))) == NULL ||
        (end = append_time(end, read_field(self, step, ENDED_AT))) == NULL ||
        (end = append(end, &bits, sizeof(bits))) == NULL ||
        (end = append_integer(end, read_field(self, counts, MICRO_BATCHES))) == NULL ||
        (end = append_count(end, read_field(self, counts, SAMPLES))) == NULL ||
        (end = append_count(end, read_field(self, counts, TOKENS))) == NULL ||
        (end = append_float(end, loss_of(self, counts))) == NULL ||
        (end = append_float(end, read_field(self, step, GRADIENT_NORM))) == NULL ||
        (end = append_float(end, read_field(self, step, LEARNING_RATE))) == NULL ||
        (end = append_float(end, read_field(self, step, LOSS_SCALE))) == NULL)
        return NULL;
    return append_phases(self, end, step);
}

static PyObject *
StepSlots_write(StepSlots *self, PyObject *step)
{
    unsigned char bytes[MAX_STEP_BYTES + sizeof(unsigned int)];
    Py_buffer view;
    if (self->buffer == NULL) {
        PyErr_SetString(PyExc_TypeError, "the slots have no buffer");
        return NULL;
    }
    PyObject *counts = read_field(self, step, COUNTS);
    if (counts == NULL)
        return NULL;
    self->number++;
    unsigned char *end = append_step(self, bytes, step, counts);
    Py_DECREF(counts);
    if (end == NULL || PyObject_GetBuffer(self->buffer, &view, PyBUF_WRITABLE) < 0)
        return NULL;
    unsigned int sum = crc32_of(bytes, (size_t)(end - bytes));
    end = append(end, &sum, sizeof(sum));
    Py_ssize_t length = end - bytes;
    Py_ssize_t slot = (Py_ssize_t)(self->number % (unsigned long long)self->num_slots);
    Py_ssize_t start = self->first_byte + slot * length;
    int fits = start <= view.len - length;
    if (fits)
        memcpy((char *)view.buf + start, bytes, (size_t)length);
    PyBuffer_Release(&view);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "the buffer ends before this slot");
        return NULL;
    }
    return PyBool_FromLong(self->is_recoverable);
}

static void
StepSlots_dealloc(StepSlots *self)
{
    Py_CLEAR(self->buffer);
    for (int field = 0; field < NUM_FIELDS; field++)
        Py_CLEAR(self->owners[field]);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef StepSlots_methods[] = {
    {"write", (PyCFunction)StepSlots_write, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef StepSlots_members[] = {
    FIELD(StepSlots, is_recoverable, T_BOOL),
    END_OF_FIELDS,
};

static PyTypeObject StepSlots_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "zerowatch.runtime.common._hot_path.StepSlots",
    .tp_basicsize = sizeof(StepSlots),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)StepSlots_init,
    .tp_dealloc = (destructor)StepSlots_dealloc,
    .tp_members = StepSlots_members,
    .tp_methods = StepSlots_methods,
};

/* ---- Constructor: see hot_path.py ---- */

#define MAX_CONSTRUCTED 24

/* One field of the class. */
typedef struct {
    PyObject *name, *initial, *factory; /* the last two may be NULL */
    Py_ssize_t place;                   /* the byte of the field in an object */
} ConstructedField;

typedef struct {
    PyObject_HEAD
    PyTypeObject *type;
    PyObject *last_names; /* the names of the last call, each of which is that of a field */
    ConstructedField fields[MAX_CONSTRUCTED];
    vectorcallfunc vectorcall;
    int order[MAX_CONSTRUCTED]; /* the field of each of the last names */
    int num_fields;
} Constructor;

/* Notes one field of the class. Returns 0, or -1 after an error. */
static int
add_field(Constructor *self, PyObject *name, PyObject *initial, PyObject *factory,
          PyObject *missing)
{
    Py_ssize_t place = place_of_slot(self->type, name);
    if (place < 0)
        return -1;
    if (place == 0 || self->num_fields == MAX_CONSTRUCTED) {
        PyErr_Format(PyExc_ValueError, "%R is no slot, or there are too many", name);
        return -1;
    }
    self->fields[self->num_fields++] = (ConstructedField){
        .name = Py_NewRef(name),
        .initial = initial == missing ? NULL : Py_NewRef(initial),
        .factory = factory == missing ? NULL : Py_NewRef(factory),
        .place = place,
    };
    return 0;
}

/* Finds the field of each name. Returns 0, or -1 if one is unknown, or after an error. */
static int
find_order(Constructor *self, PyObject *names)
{
    Py_CLEAR(self->last_names);
    if (PyTuple_GET_SIZE(names) > MAX_CONSTRUCTED)
        return -1;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); i++) {
        int field = 0;
        while (field < self->num_fields &&
               self->fields[field].name != PyTuple_GET_ITEM(names, i)) /* both are interned */
            field++;
        if (field == self->num_fields)
            return -1;
        self->order[i] = field;
    }
    self->last_names = Py_NewRef(names);
    return 0;
}

static PyObject **
field_at(Constructor *self, PyObject *object, int field)
{
    return (PyObject **)((char *)object + self->fields[field].place);
}

/* Sets the fields of a new object. Returns 0; -1 if the class must report what is wrong, or after an
 * error. */
static int
fill(Constructor *self, PyObject *made, PyObject *const *args, Py_ssize_t num_args,
     PyObject *names)
{
    if (num_args > self->num_fields ||
        (names != NULL && names != self->last_names && find_order(self, names) < 0))
        return -1;
    for (int i = 0; i < num_args; i++)
        *field_at(self, made, i) = Py_NewRef(args[i]);
    for (Py_ssize_t i = 0; names != NULL && i < PyTuple_GET_SIZE(names); i++) {
        PyObject **field = field_at(self, made, self->order[i]);
        if (*field != NULL) /* given twice */
            return -1;
        *field = Py_NewRef(args[num_args + i]);
    }
    for (int i = 0; i < self->num_fields; i++) {
        ConstructedField *known = &self->fields[i];
        PyObject **field = field_at(self, made, i);
        if (*field == NULL && known->initial != NULL)
            *field = Py_NewRef(known->initial);
        else if (*field == NULL && known->factory != NULL)
            *field = PyObject_CallNoArgs(known->factory);
        if (*field == NULL)
            return -1;
    }
    return 0;
}

static PyObject *
Constructor_vectorcall(Constructor *self, PyObject *const *args, size_t nargsf, PyObject *names)
{
    PyObject *made = self->type->tp_alloc(self->type, 0);
    if (made == NULL)
        return NULL;
    if (fill(self, made, args, PyVectorcall_NARGS(nargsf), names) == 0)
        return made;
    Py_DECREF(made);
    return PyErr_Occurred() ? NULL
                            : PyObject_Vectorcall((PyObject *)self->type, args, nargsf, names);
}

static int
Constructor_init(Constructor *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"made", "fields", "missing", NULL};
    PyObject *type, *fields, *missing;
    if (self->type != NULL) {
        PyErr_SetString(PyExc_TypeError, "a constructor is initialized once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O", names, &PyType_Type, &type,
                                     &PyTuple_Type, &fields, &missing))
        return -1;
    self->type = (PyTypeObject *)Py_NewRef(type);
    self->vectorcall = (vectorcallfunc)Constructor_vectorcall;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(fields); i++) {
        PyObject *name, *initial, *factory;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(fields, i), "UOO", &name, &initial, &factory) ||
            add_field(self, name, initial, factory, missing) < 0)
            return -1;
    }
    return 0;
}

static void
Constructor_dealloc(Constructor *self)
{
    for (int i = 0; i < self->num_fields; i++) {
        Py_CLEAR(self->fields[i].name);
        Py_CLEAR(self->fields[i].initial);
        Py_CLEAR(self->fields[i].factory);
    }
    Py_CLEAR(self->last_names);
    Py_CLEAR(self->type);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject Constructor_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "zerowatch.runtime.common._hot_path.Constructor",
    .tp_basicsize = sizeof(Constructor),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Constructor, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Constructor_init,
    .tp_dealloc = (destructor)Constructor_dealloc,
};

/* ---- MemoryHookFields, StepCollectorFields, EngineHookFields: see hot_path.py ---- */

/* The phases of the passes, by their numbers in phase_timer.py. */
enum { FORWARD = 1, BACKWARD = 2, OPTIMIZER = 3 };

typedef struct {
    PyObject_HEAD
    PyObject *forecasts, *known_shape, *known_risks;
    double reading_due;
    long micro_batch;
} MemoryHookFields;

static PyMemberDef MemoryHookFields_members[] = {
    FIELD(MemoryHookFields, micro_batch, T_LONG),
    FIELD(MemoryHookFields, reading_due, T_DOUBLE),
    PRIVATE(MemoryHookFields, forecasts, T_OBJECT_EX),
    PRIVATE(MemoryHookFields, known_shape, T_OBJECT_EX),
    PRIVATE(MemoryHookFields, known_risks, T_OBJECT_EX),
    END_OF_FIELDS,
};

COLLECTED(MemoryHookFields)

static PyTypeObject MemoryHookFields_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "zerowatch.runtime.common._hot_path.MemoryHookFields",
    .tp_basicsize = sizeof(MemoryHookFields),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)MemoryHookFields_dealloc,
    .tp_traverse = (traverseproc)MemoryHookFields_traverse,
    .tp_clear = (inquiry)MemoryHookFields_clear,
    .tp_members = MemoryHookFields_members,
};

/* Returns whether a hook has got its two arguments. If not, a TypeError is set. */
static int
are_two(Py_ssize_t num_args)
{
    if (num_args != 2)
        PyErr_Format(PyExc_TypeError, "expected 2 arguments, got %zd", num_args);
    return num_args == 2;
}

/* Whether a field of kind T_OBJECT is None. */
static int
is_none(PyObject *field)
{
    return field == NULL || field == Py_None;
}

/* Returns the clock of a field, borrowed; NULL if it is of another class, as in tests. */
static PhaseClock *
clock_of(PyObject *timer)
{
    return timer != NULL && PyObject_TypeCheck(timer, &PhaseClock_Type) ? (PhaseClock *)timer : NULL;
}

/* Returns the hooks on memory of a field, borrowed; NULL if they are of another class. */
static MemoryHookFields *
memory_of(PyObject *memory)
{
    int is_known = memory != NULL && PyObject_TypeCheck(memory, &MemoryHookFields_Type);
    return is_known ? (MemoryHookFields *)memory : NULL;
}

/* Returns the number of a tensor in host memory, by a ScalarReader. NULL without an exception if it
 * is another object, or must be read by Python code; with one only after an interrupt. */
static PyObject *
value_in(PyObject *reader, PyObject *source)
{
    PyObject *value = NULL;
    if (reader != NULL && Py_IS_TYPE(reader, &ScalarReader_Type))
        value = read_scalar((ScalarReader *)reader, source);
    if (value == NULL && !is_interrupt())
        PyErr_Clear();
    return value;
}

typedef struct {
    PyObject_HEAD
    PyObject *phase_timer, *memory, *calls, *device_phases, *enqueue, *new_step, *read_value;
    PyObject *take_unseen, *gradient_norm, *learning_rate, *trace, *profile, *modules;
    double coverage_due;
    unsigned long training_thread;
    char scales_loss;
} StepCollectorFields;

/* Whether nothing but the step itself is due, so that the common way is enough. */
static int
is_common_step(StepCollectorFields *self)
{
    PhaseClock *clock = clock_of(self->phase_timer);
    MemoryHookFields *memory = memory_of(self->memory);
    double now = (double)now_ns() / 1e9; /* as time.monotonic */
    return clock != NULL && memory != NULL && is_none(self->take_unseen) && !self->scales_loss &&
           now < self->coverage_due && now < memory->reading_due && is_none(clock->on_change) &&
           is_none(clock->intervals) && clock->training_thread == self->training_thread &&
           self->new_step != NULL && self->calls != NULL && self->enqueue != NULL &&
           self->gradient_norm != NULL && self->learning_rate != NULL && self->trace != NULL &&
           self->modules != NULL;
}

/* Returns the gradient norm. If it cannot be read here, Python code counts why. */
static PyObject *
gradient_norm_of(StepCollectorFields *self, PyObject *engine)
{
    if (!is_off(self->gradient_norm)) {
        PyObject *norm = PyObject_CallMethodNoArgs(engine, s_get_global_grad_norm);
        if (norm != NULL && (PyFloat_CheckExact(norm) || norm == Py_None))
            return norm;
        PyObject *value = norm == NULL ? NULL : value_in(self->read_value, norm);
        Py_XDECREF(norm);
        if (value != NULL || is_interrupt())
            return value;
        PyErr_Clear();
    }
    return PyObject_CallOneArg(self->gradient_norm, engine);
}

/* Returns the learning rate of the first group of parameters, as gradient_norm_of. */
static PyObject *
learning_rate_of(StepCollectorFields *self, PyObject *engine)
{
    PyObject *rate = NULL;
    if (!is_off(self->learning_rate)) {
        PyObject *optimizer = PyObject_GetAttr(engine, s_optimizer);
        PyObject *groups = optimizer == NULL ? NULL : PyObject_GetAttr(optimizer, s_param_groups);
        if (groups != NULL && PyList_CheckExact(groups) && PyList_GET_SIZE(groups) > 0 &&
            PyDict_CheckExact(PyList_GET_ITEM(groups, 0)))
            rate = PyDict_GetItemWithError(PyList_GET_ITEM(groups, 0), s_lr);
        rate = rate != NULL && PyFloat_CheckExact(rate) ? Py_NewRef(rate) : NULL;
        Py_XDECREF(groups);
        Py_XDECREF(optimizer);
        if (rate != NULL || is_interrupt())
            return rate;
        PyErr_Clear();
    }
    return PyObject_CallOneArg(self->learning_rate, engine);
}

/* Returns the labels of the script's own span; None if there is none. */
static PyObject *
trace_of(StepCollectorFields *self)
{
    int is_loaded = PySequence_Contains(self->modules, s_opentelemetry);
    if (is_loaded < 0)
        return NULL;
    return is_loaded ? PyObject_CallNoArgs(self->trace) : Py_NewRef(Py_None);
}

/* As time.time(). */
static PyObject *
time_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return PyFloat_FromDouble((double)(now.tv_sec * 1000000000LL + now.tv_nsec) / 1e9);
}

/* Returns the raw step: its fields in the order of raw_step.py. */
static PyObject *
make_step(StepCollectorFields *self, PyObject *engine, PyObject *counts)
{
    enum { NUM_PARTS = 13 };
    PyObject *parts[NUM_PARTS] = {NULL}, *step = NULL;
    int is_on_device = !is_none(self->device_phases);
    if ((parts[0] = PyObject_GetAttr(engine, s_global_steps)) == NULL ||
        (parts[1] = time_now()) == NULL ||
        (parts[2] = PhaseClock_drain((PhaseClock *)self->phase_timer, NULL)) == NULL ||
        (parts[3] = PyTuple_New(0)) == NULL)
        goto end;
    parts[4] = Py_NewRef(counts);
    parts[5] = Py_NewRef(Py_None); /* the coverage */
    if ((parts[6] = gradient_norm_of(self, engine)) == NULL ||
        (parts[7] = learning_rate_of(self, engine)) == NULL)
        goto end;
    parts[8] = Py_NewRef(Py_None); /* the loss scale */
    if ((parts[9] = trace_of(self)) == NULL)
        goto end;
    parts[10] = Py_NewRef(Py_None); /* the sample of memory */
    if ((parts[11] = PyObject_CallMethodNoArgs(self->calls, s_drain)) == NULL)
        goto end;
    parts[12] = is_on_device ? PyObject_CallMethodNoArgs(self->device_phases, s_end_step)
                             : Py_NewRef(Py_None);
    if (parts[12] != NULL)
        step = PyObject_Vectorcall(self->new_step, parts, NUM_PARTS, NULL);
end:
    for (int i = 0; i < NUM_PARTS; i++)
        Py_XDECREF(parts[i]);
    return step;
}

/* Chooses whether the calls of the step after this one are sampled. Only ends of calls on a device
 * are. */
static int
begin_next_step(StepCollectorFields *self, PyObject *number)
{
    PyObject *one = PyLong_FromLong(1), *next = one == NULL ? NULL : PyNumber_Add(number, one);
    PyObject *result =
        next == NULL ? NULL : PyObject_CallMethodOneArg(self->calls, s_begin_step, next);
    Py_XDECREF(one);
    Py_XDECREF(next);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

static PyObject *
StepCollectorFields_on_step_end(StepCollectorFields *self, PyObject *const *args, Py_ssize_t num_args)
{
    if (!are_two(num_args))
        return NULL;
    if (!is_common_step(self)) {
        PyObject *all[] = {(PyObject *)self, args[0], args[1]};
        return PyObject_VectorcallMethod(s_collect_in_python, all, 3, NULL);
    }
    PyObject *number = NULL, *result = NULL, *step = make_step(self, args[0], args[1]);
    if (step != NULL)
        number = PyObject_GetAttr(step, s_step);
    if (number == NULL || (!is_none(self->device_phases) && begin_next_step(self, number) < 0))
        goto end;
    result = PyObject_CallOneArg(self->enqueue, step);
    if (result != NULL && !is_none(self->profile))
        Py_SETREF(result, PyObject_CallOneArg(self->profile, number));
end:
    Py_XDECREF(number);
    Py_XDECREF(step);
    return result;
}

static PyMemberDef StepCollectorFields_members[] = {
    PRIVATE(StepCollectorFields, phase_timer, T_OBJECT_EX),
    PRIVATE(StepCollectorFields, memory, T_OBJECT_EX),
    PRIVATE(StepCollectorFields, calls, T_OBJECT_EX),
    PRIVATE(StepCollectorFields, device_phases, T_OBJECT),
    PRIVATE(StepCollectorFields, enqueue, T_OBJECT_EX),
    PRIVATE(StepCollectorFields, new_step, T_OBJECT_EX),
    PRIVATE(StepCollectorFields, read_value, T_OBJECT_EX),
    PRIVATE(StepCollectorFields, take_unseen, T_OBJECT),
    PRIVATE(StepCollectorFields, gradient_norm, T_OBJECT_EX),
    PRIVATE(StepCollectorFields, learning_rate, T_OBJECT_EX),
    PRIVATE(StepCollectorFields, trace, T_OBJECT_EX),
    PRIVATE(StepCollectorFields, profile, T_OBJECT),
    PRIVATE(StepCollectorFields, modules, T_OBJECT_EX),
    PRIVATE(StepCollectorFields, coverage_due, T_DOUBLE),
    PRIVATE(StepCollectorFields, training_thread, T_ULONG),
    PRIVATE(StepCollectorFields, scales_loss, T_BOOL),
    END_OF_FIELDS,
};

COLLECTED(StepCollectorFields)

static PyMethodDef StepCollectorFields_methods[] = {
    {"on_step_end", (PyCFunction)(void (*)(void))StepCollectorFields_on_step_end, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject StepCollectorFields_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "zerowatch.runtime.common._hot_path.StepCollectorFields",
    .tp_basicsize = sizeof(StepCollectorFields),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)StepCollectorFields_dealloc,
    .tp_traverse = (traverseproc)StepCollectorFields_traverse,
    .tp_clear = (inquiry)StepCollectorFields_clear,
    .tp_members = StepCollectorFields_members,
    .tp_methods = StepCollectorFields_methods,
};

/* The slots of StepCounts and BatchShape that are read and written, see raw_step.py. */
enum {
    C_MICRO_BATCHES, C_SAMPLES, C_TOKENS, C_LENGTH, C_LOSSES, C_SKIPPED, NUM_C_SLOTS,
};
enum { S_SAMPLES, S_TOKENS, S_LENGTH, NUM_S_SLOTS };
static PyObject **const names_in_counts[NUM_C_SLOTS] = {
    &s_micro_batches, &s_samples, &s_tokens, &s_sequence_length, &s_losses, &s_skipped,
};
static PyObject **const names_in_shape[NUM_S_SLOTS] = {&s_samples, &s_tokens, &s_sequence_length};

typedef struct {
    PyObject_HEAD
    PyObject *engine, *phase_timer, *memory, *generation, *collect, *new_counts;
    PyObject *counts, *shapes, *loss, *output, *steps_before, *skipped_before;
    PyObject *tensor_type, *is_grad_enabled, *read_shape, *read_value, *on_batch_start, *read_loss;
    PyTypeObject *counts_type, *shape_type;
    Py_ssize_t in_counts[NUM_C_SLOTS], in_shape[NUM_S_SLOTS];
    char inside_backward, plain_backward, is_pipeline, losses_are_divided;
} EngineHookFields;

/* Calls the method in Python that does the same, in any case. */
static PyObject *
in_python(EngineHookFields *self, PyObject *name, PyObject *const *args)
{
    PyObject *all[] = {(PyObject *)self, args[0], args[1]};
    return PyObject_VectorcallMethod(name, all, 3, NULL);
}

/* Returns a new reference to the engine; NULL without an exception if it is gone. */
static PyObject *
engine_of(EngineHookFields *self)
{
    if (self->engine == NULL || !PyWeakref_Check(self->engine))
        return NULL;
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *engine;
    return PyWeakref_GetRef(self->engine, &engine) == 1 ? engine : NULL;
#else
    PyObject *engine = PyWeakref_GetObject(self->engine);
    return engine == Py_None ? NULL : Py_XNewRef(engine);
#endif
}

/* Finds the slots of a class. Returns whether the class has all of them. */
static int
has_slots(PyTypeObject **known, PyTypeObject *type, Py_ssize_t *places, PyObject **const *names,
          int num_names)
{
    if (*known == type)
        return 1;
    Py_CLEAR(*known); /* its places are overwritten */
    for (int i = 0; i < num_names; i++)
        if ((places[i] = place_of_slot(type, *names[i])) <= 0) {
            PyErr_Clear();
            return 0;
        }
    *known = (PyTypeObject *)Py_NewRef((PyObject *)type);
    return 1;
}

static PyObject **
slot_at(PyObject *object, Py_ssize_t place)
{
    return (PyObject **)((char *)object + place);
}

/* Whether the counts of the step are of the class that is known. */
static int
are_counts_known(EngineHookFields *self)
{
    if (self->counts == NULL || !has_slots(&self->counts_type, Py_TYPE(self->counts),
                                           self->in_counts, names_in_counts, NUM_C_SLOTS))
        return 0;
    for (int slot = 0; slot < NUM_C_SLOTS; slot++)
        if (*slot_at(self->counts, self->in_counts[slot]) == NULL)
            return 0;
    return PyLong_CheckExact(*slot_at(self->counts, self->in_counts[C_MICRO_BATCHES])) &&
           PyList_CheckExact(*slot_at(self->counts, self->in_counts[C_LOSSES]));
}

/* Returns the shape of a batch on which the model trains; NULL if Python code must read it. */
static PyObject *
trained_shape(EngineHookFields *self, PyObject *const *both)
{
    PyObject *engine = engine_of(self);
    if (engine == NULL)
        return NULL;
    PyObject *module = PyObject_GetAttr(engine, s_module);
    int trains = module != NULL && is_attribute(module, s_training, Py_True, 0);
    Py_XDECREF(module);
    Py_DECREF(engine);
    PyObject *enabled = trains ? PyObject_CallNoArgs(self->is_grad_enabled) : NULL;
    Py_XDECREF(enabled); /* only compared */
    return enabled == Py_True ? PyObject_Vectorcall(self->read_shape, both, 2, NULL) : NULL;
}

/* Whether the batch has a shape that was assessed by the present forecasts. Notes its number. Returns
 * -1 after an interrupt. */
static int
is_known_batch(EngineHookFields *self, PyObject *shape, long number)
{
    MemoryHookFields *memory = memory_of(self->memory);
    if (memory == NULL || is_off(self->on_batch_start) || memory->known_shape != shape ||
        memory->forecasts == NULL)
        return 0;
    PyObject *risks = PyObject_GetAttr(memory->forecasts, s_known_risks);
    Py_XDECREF(risks); /* only compared */
    if (is_interrupt())
        return -1;
    PyErr_Clear(); /* Python code will raise it again where it is counted */
    memory->micro_batch = number;
    return risks != NULL && risks == memory->known_risks;
}

static PyObject *
EngineHookFields_begin_forward(EngineHookFields *self, PyObject *const *args, Py_ssize_t num_args)
{
    if (!are_two(num_args))
        return NULL;
    PhaseClock *clock = clock_of(self->phase_timer);
    int is_common = clock != NULL && !self->plain_backward && self->is_grad_enabled != NULL &&
                    self->read_shape != NULL && self->on_batch_start != NULL &&
                    self->shapes != NULL && PyList_CheckExact(self->shapes);
    PyObject *shape = is_common ? trained_shape(self, args) : NULL;
    if (shape == NULL || !are_counts_known(self)) { /* after code of the module, which may be any */
        Py_XDECREF(shape);
        if (is_interrupt())
            return NULL;
        PyErr_Clear();
        return in_python(self, s_on_forward_start, args);
    }
    long number = PyLong_AsLong(*slot_at(self->counts, self->in_counts[C_MICRO_BATCHES])) + 1;
    PyObject *result = NULL;
    if (PyList_Append(self->shapes, shape) == 0 && enter_phase(clock, FORWARD) == 0) {
        int is_known = is_known_batch(self, shape, number);
        if (is_known > 0)
            result = Py_NewRef(Py_None);
        else if (is_known == 0)
            result = PyObject_CallFunction(self->on_batch_start, "Ol", shape, number);
    }
    Py_DECREF(shape);
    return result;
}

static PyObject *
EngineHookFields_end_forward(EngineHookFields *self, PyObject *const *args, Py_ssize_t num_args)
{
    if (!are_two(num_args))
        return NULL;
    PhaseClock *clock = clock_of(self->phase_timer);
    if (clock == NULL || args[1] != Py_True || self->tensor_type == NULL ||
        !PyType_Check(self->tensor_type) ||
        !PyObject_TypeCheck(args[0], (PyTypeObject *)self->tensor_type))
        return in_python(self, s_on_forward_end, args);
    if (leave_phase(clock) < 0)
        return NULL;
    PyObject *output = PyWeakref_NewRef(args[0], NULL);
    if (output == NULL)
        return NULL;
    Py_XSETREF(self->output, output);
    Py_RETURN_NONE;
}

static PyObject *
EngineHookFields_begin_backward(EngineHookFields *self, PyObject *const *args, Py_ssize_t num_args)
{
    if (num_args != 2 || !PyTuple_Check(args[0]) || !PyDict_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "expected the arguments of a call");
        return NULL;
    }
    PhaseClock *clock = clock_of(self->phase_timer);
    if (clock == NULL || PyTuple_GET_SIZE(args[0]) != 1 || PyDict_GET_SIZE(args[1]) != 0 ||
        self->losses_are_divided || self->read_loss == NULL)
        return in_python(self, s_on_backward_start, args);
    self->inside_backward = 1;
    if (enter_phase(clock, BACKWARD) < 0)
        return NULL;
    PyObject *source = PyTuple_GET_ITEM(args[0], 0), *loss = value_in(self->read_value, source);
    if (loss == NULL && !PyErr_Occurred())
        loss = PyObject_CallOneArg(self->read_loss, source);
    if (loss == NULL)
        return NULL;
    Py_XSETREF(self->loss, loss);
    Py_RETURN_NONE;
}

/* Adds to a count, which is None until something was added. */
static int
add_count(PyObject **total, PyObject *more)
{
    PyObject *sum = *total == Py_None ? Py_NewRef(more) : PyNumber_Add(*total, more);
    if (sum == NULL)
        return -1;
    Py_SETREF(*total, sum);
    return 0;
}

/* Adds the shape of a forward pass to counts. */
static int
add_shape(EngineHookFields *self, PyObject *counts, PyObject *shape)
{
    PyObject *samples = *slot_at(shape, self->in_shape[S_SAMPLES]);
    PyObject *tokens = *slot_at(shape, self->in_shape[S_TOKENS]);
    PyObject *length = *slot_at(shape, self->in_shape[S_LENGTH]);
    if (samples != Py_None &&
        add_count(slot_at(counts, self->in_counts[C_SAMPLES]), samples) < 0)
        return -1;
    if (tokens == Py_None)
        return 0;
    set_object(slot_at(counts, self->in_counts[C_LENGTH]), length);
    return add_count(slot_at(counts, self->in_counts[C_TOKENS]), tokens);
}

/* Whether the shapes of the forward passes are of the class that is known. */
static int
are_shapes_known(EngineHookFields *self)
{
    if (self->shapes == NULL || !PyList_CheckExact(self->shapes))
        return 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(self->shapes); i++) {
        PyObject *shape = PyList_GET_ITEM(self->shapes, i);
        if (!has_slots(&self->shape_type, Py_TYPE(shape), self->in_shape, names_in_shape,
                       NUM_S_SLOTS))
            return 0;
        for (int slot = 0; slot < NUM_S_SLOTS; slot++)
            if (*slot_at(shape, self->in_shape[slot]) == NULL)
                return 0;
    }
    return 1;
}

/* Adds one micro-batch to counts, as `add` of StepCounts. */
static int
add_micro_batch(EngineHookFields *self, PyObject *counts, PyObject *shapes)
{
    PyObject **number = slot_at(counts, self->in_counts[C_MICRO_BATCHES]);
    PyObject *next = PyLong_FromLong(PyLong_AsLong(*number) + 1);
    if (next == NULL)
        return -1;
    Py_SETREF(*number, next);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(shapes); i++)
        if (add_shape(self, counts, PyList_GET_ITEM(shapes, i)) < 0)
            return -1;
    PyObject *loss = self->loss == NULL ? Py_None : self->loss;
    return PyList_Append(*slot_at(counts, self->in_counts[C_LOSSES]), loss);
}

static PyObject *
EngineHookFields_end_backward(EngineHookFields *self, PyObject *const *args, Py_ssize_t num_args)
{
    if (!are_two(num_args))
        return NULL;
    PhaseClock *clock = clock_of(self->phase_timer);
    if (clock == NULL || args[1] != Py_True || !are_counts_known(self) || !are_shapes_known(self))
        return in_python(self, s_on_backward_end, args);
    self->inside_backward = 0;
    /* Kept, as a listener to the phases may run any code. */
    PyObject *counts = Py_NewRef(self->counts), *shapes = Py_NewRef(self->shapes);
    PyObject *none = PyList_New(0);
    int is_added = none != NULL && leave_phase(clock) == 0 &&
                   add_micro_batch(self, counts, shapes) == 0;
    Py_DECREF(counts);
    Py_DECREF(shapes);
    if (!is_added) {
        Py_XDECREF(none);
        return NULL;
    }
    Py_XSETREF(self->shapes, none);
    Py_CLEAR(self->loss);
    Py_RETURN_NONE;
}

static PyObject *
EngineHookFields_begin_step(EngineHookFields *self, PyObject *const *args, Py_ssize_t num_args)
{
    if (!are_two(num_args))
        return NULL;
    PhaseClock *clock = clock_of(self->phase_timer);
    int is_common = clock != NULL && !self->plain_backward && !self->is_pipeline &&
                    is_none(clock->on_change);
    PyObject *engine = is_common ? engine_of(self) : NULL;
    if (engine == NULL)
        return in_python(self, s_on_step_start, args);
    clock->training_thread = PyThread_get_thread_ident();
    PyObject *steps = PyObject_GetAttr(engine, s_global_steps);
    PyObject *skipped = steps == NULL ? NULL : PyObject_GetAttr(engine, s_skipped_steps);
    Py_DECREF(engine);
    if (skipped == NULL) {
        Py_XDECREF(steps);
        return NULL;
    }
    Py_XSETREF(self->steps_before, steps);
    Py_XSETREF(self->skipped_before, skipped);
    if (enter_phase(clock, OPTIMIZER) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* Returns the counts of the step that has ended, and begins new ones. */
static PyObject *
take_counts(EngineHookFields *self, PyObject *engine)
{
    PyObject *none = PyList_New(0), *skipped = PyObject_GetAttr(engine, s_skipped_steps);
    PyObject *new = none == NULL || skipped == NULL ? NULL : PyObject_CallNoArgs(self->new_counts);
    int was_skipped =
        new == NULL ? -1 : PyObject_RichCompareBool(skipped, self->skipped_before, Py_NE);
    Py_XDECREF(skipped);
    if (was_skipped >= 0 && !are_counts_known(self)) { /* a listener to the phases ran any code */
        PyErr_SetString(PyExc_TypeError, "the counts of the step are no StepCounts");
        was_skipped = -1;
    }
    if (was_skipped < 0) {
        Py_XDECREF(none);
        Py_XDECREF(new);
        return NULL;
    }
    PyObject *counts = self->counts;
    self->counts = new;
    set_object(slot_at(counts, self->in_counts[C_SKIPPED]), TRUTH(was_skipped));
    Py_XSETREF(self->shapes, none); /* shapes of forward passes without a backward pass */
    return counts;
}

static PyObject *
EngineHookFields_end_step(EngineHookFields *self, PyObject *const *args, Py_ssize_t num_args)
{
    if (!are_two(num_args))
        return NULL;
    PhaseClock *clock = clock_of(self->phase_timer);
    int is_common = clock != NULL && !self->is_pipeline && self->steps_before != NULL &&
                    self->skipped_before != NULL && self->new_counts != NULL &&
                    self->collect != NULL && self->generation != NULL && are_counts_known(self) &&
                    is_attribute(self->generation, s_counts, Py_None, 0);
    PyObject *engine = is_common ? engine_of(self) : NULL;
    if (engine == NULL) {
        if (is_interrupt())
            return NULL;
        PyErr_Clear();
        return in_python(self, s_on_step_end, args);
    }
    PyObject *steps = NULL, *result = NULL;
    if (leave_phase(clock) < 0 || (steps = PyObject_GetAttr(engine, s_global_steps)) == NULL)
        goto end;
    int is_same = PyObject_RichCompareBool(steps, self->steps_before, Py_EQ);
    if (is_same > 0)
        result = Py_NewRef(Py_None);
    else if (is_same == 0) {
        PyObject *both[] = {engine, take_counts(self, engine)};
        if (both[1] != NULL)
            result = PyObject_Vectorcall(self->collect, both, 2, NULL);
        Py_XDECREF(both[1]);
    }
end:
    Py_XDECREF(steps);
    Py_DECREF(engine);
    return result;
}

static PyMemberDef EngineHookFields_members[] = {
    PRIVATE(EngineHookFields, engine, T_OBJECT_EX),
    PRIVATE(EngineHookFields, phase_timer, T_OBJECT_EX),
    PRIVATE(EngineHookFields, memory, T_OBJECT_EX),
    PRIVATE(EngineHookFields, generation, T_OBJECT_EX),
    PRIVATE(EngineHookFields, collect, T_OBJECT_EX),
    PRIVATE(EngineHookFields, new_counts, T_OBJECT_EX),
    PRIVATE(EngineHookFields, counts, T_OBJECT_EX),
    PRIVATE(EngineHookFields, shapes, T_OBJECT_EX),
    PRIVATE(EngineHookFields, loss, T_OBJECT),
    PRIVATE(EngineHookFields, output, T_OBJECT_EX),
    PRIVATE(EngineHookFields, steps_before, T_OBJECT_EX),
    PRIVATE(EngineHookFields, skipped_before, T_OBJECT_EX),
    PRIVATE(EngineHookFields, tensor_type, T_OBJECT_EX),
    PRIVATE(EngineHookFields, is_grad_enabled, T_OBJECT_EX),
    PRIVATE(EngineHookFields, read_shape, T_OBJECT_EX),
    PRIVATE(EngineHookFields, read_value, T_OBJECT_EX),
    PRIVATE(EngineHookFields, on_batch_start, T_OBJECT_EX),
    PRIVATE(EngineHookFields, read_loss, T_OBJECT_EX),
    PRIVATE(EngineHookFields, inside_backward, T_BOOL),
    PRIVATE(EngineHookFields, plain_backward, T_BOOL),
    PRIVATE(EngineHookFields, is_pipeline, T_BOOL),
    PRIVATE(EngineHookFields, losses_are_divided, T_BOOL),
    END_OF_FIELDS,
};

static int
EngineHookFields_traverse(EngineHookFields *self, visitproc visit, void *arg)
{
    Py_VISIT(self->counts_type);
    Py_VISIT(self->shape_type);
    return visit_fields((PyObject *)self, EngineHookFields_members, visit, arg);
}

static int
EngineHookFields_clear(EngineHookFields *self)
{
    Py_CLEAR(self->counts_type);
    Py_CLEAR(self->shape_type);
    clear_fields((PyObject *)self, EngineHookFields_members);
    return 0;
}

static void
EngineHookFields_dealloc(EngineHookFields *self)
{
    PyObject_GC_UnTrack(self);
    EngineHookFields_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

#define METHOD(name) \
    {"_" #name, (PyCFunction)(void (*)(void))EngineHookFields_##name, METH_FASTCALL, NULL}

static PyMethodDef EngineHookFields_methods[] = {
    METHOD(begin_forward),
    METHOD(end_forward),
    METHOD(begin_backward),
    METHOD(end_backward),
    METHOD(begin_step),
    METHOD(end_step),
    {NULL, NULL, 0, NULL},
};

static PyTypeObject EngineHookFields_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "zerowatch.runtime.common._hot_path.EngineHookFields",
    .tp_basicsize = sizeof(EngineHookFields),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)EngineHookFields_dealloc,
    .tp_traverse = (traverseproc)EngineHookFields_traverse,
    .tp_clear = (inquiry)EngineHookFields_clear,
    .tp_members = EngineHookFields_members,
    .tp_methods = EngineHookFields_methods,
};

/* ---- InboxFields: what `enqueue` reads and writes of monitor/watch_thread.py ---- */

typedef struct {
    PyObject_HEAD
    PyObject *inbox, *pending, *write_ring, *bell, *step_type;
    Py_ssize_t waking_items, max_pending;
    long long num_steps;
    char is_logged;
} InboxFields;

/* Whether an item is a step without a sample of memory, and neither wakes the thread nor is lost. */
static int
is_common_item(InboxFields *self, PyObject *item)
{
    if ((PyObject *)Py_TYPE(item) != self->step_type || self->inbox == NULL ||
        self->pending == NULL || self->bell == NULL || (self->is_logged && is_none(self->write_ring)))
        return 0;
    Py_ssize_t received = PyObject_Size(self->inbox), pending = PyObject_Size(self->pending);
    return received >= 0 && pending >= 0 && received < self->waking_items &&
           received + pending < self->max_pending && is_attribute(item, s_memory, Py_None, 0);
}

static PyObject *
InboxFields_enqueue(InboxFields *self, PyObject *item)
{
    if (!is_common_item(self, item)) {
        if (is_interrupt())
            return NULL;
        PyErr_Clear();
        return PyObject_CallMethodOneArg((PyObject *)self, s_enqueue_in_python, item);
    }
    self->num_steps++;
    int can_wait = 1;
    if (self->is_logged) {
        PyObject *is_recoverable = PyObject_CallOneArg(self->write_ring, item);
        if (is_recoverable == NULL)
            return NULL;
        can_wait = is_recoverable == Py_True;
        Py_DECREF(is_recoverable);
    }
    PyObject *result = PyObject_CallMethodOneArg(self->inbox, s_append, item);
    if (result != NULL && !can_wait)
        Py_SETREF(result, PyObject_CallMethodOneArg(self->bell, s_put, Py_None));
    return result;
}

static PyMemberDef InboxFields_members[] = {
    PRIVATE(InboxFields, inbox, T_OBJECT_EX),
    PRIVATE(InboxFields, pending, T_OBJECT_EX),
    PRIVATE(InboxFields, write_ring, T_OBJECT),
    PRIVATE(InboxFields, bell, T_OBJECT_EX),
    PRIVATE(InboxFields, step_type, T_OBJECT_EX),
    PRIVATE(InboxFields, waking_items, T_PYSSIZET),
    PRIVATE(InboxFields, max_pending, T_PYSSIZET),
    FIELD(InboxFields, num_steps, T_LONGLONG),
    PRIVATE(InboxFields, is_logged, T_BOOL),
    END_OF_FIELDS,
};

COLLECTED(InboxFields)

static PyMethodDef InboxFields_methods[] = {
    {"enqueue", (PyCFunction)InboxFields_enqueue, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject InboxFields_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "zerowatch.runtime.common._hot_path.InboxFields",
    .tp_basicsize = sizeof(InboxFields),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)InboxFields_dealloc,
    .tp_traverse = (traverseproc)InboxFields_traverse,
    .tp_clear = (inquiry)InboxFields_clear,
    .tp_members = InboxFields_members,
    .tp_methods = InboxFields_methods,
};

/* ---- the module ---- */

static PyMethodDef functions[] = {
    {"have_ended_on_host", have_ended_on_host, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "zerowatch.runtime.common._hot_path",
    .m_size = -1,
    .m_methods = functions,
};

static int
make_names(void)
{
    const struct {
        PyObject **name;
        const char *text;
    } names[] = {
        {&s_dtype, "dtype"},
        {&s_nbytes, "nbytes"},
        {&s_is_sparse, "is_sparse"},
        {&s_append, "append"},
        {&s_get_future, "get_future"},
        {&s_add_done_callback, "add_done_callback"},
        {&s_keep_handles, "_keep_handles"},
        {&s_is_cpu, "is_cpu"},
        {&s_data_ptr, "data_ptr"},
        {&s_is_neg, "is_neg"},
        {&s_numel, "numel"},
        {&s_world, "WORLD"},
        {&s_batch_is_full, "_pass_batch_on"},
        {&s_busy_until_ns, "busy_until_ns"},
        {&s_maybe_busy_until_ns, "maybe_busy_until_ns"},
        {&s_events, "events"},
        {&s_stream_waits, "stream_waits"},
        {&s_get_device, "get_device"},
        {&s_device_index, "device_index"},
        {&s_current_device, "_current_device"},
        {&s_current_stream, "_current_stream"},
        {&s_is_capturing, "_is_capturing"},
        {&s_disabled, "disabled"},
        {&s_take, "take"},
        {&s_record, "_record"},
        {&s_compute, "_compute"},
        {&s_blocks_compute, "blocks_compute"},
        {&s_find_end_on_device, "_find_end_on_device"},
        {&s_is_training_thread, "_is_training_thread"},
        {&s_sees_device, "_sees_device"},
        {&s_counts, "counts"},
        {&s_losses, "losses"},
        {&s_loss, "loss"},
        {&s_step, "step"},
        {&s_ended_at, "ended_at"},
        {&s_skipped, "skipped"},
        {&s_device_phases, "device_phases"},
        {&s_micro_batches, "micro_batches"},
        {&s_samples, "samples"},
        {&s_tokens, "tokens"},
        {&s_gradient_norm, "gradient_norm"},
        {&s_learning_rate, "learning_rate"},
        {&s_loss_scale, "loss_scale"},
        {&s_phase_ns, "phase_ns"},
        {&s_shape, "shape"},
        {&s_is_floating_point, "is_floating_point"},
        {&s_storage_offset, "storage_offset"},
        {&s_global_steps, "global_steps"},
        {&s_skipped_steps, "skipped_steps"},
        {&s_module, "module"},
        {&s_training, "training"},
        {&s_optimizer, "optimizer"},
        {&s_param_groups, "param_groups"},
        {&s_lr, "lr"},
        {&s_get_global_grad_norm, "get_global_grad_norm"},
        {&s_drain, "drain"},
        {&s_end_step, "end_step"},
        {&s_begin_step, "begin_step"},
        {&s_known_risks, "known_risks"},
        {&s_sequence_length, "sequence_length"},
        {&s_opentelemetry, "opentelemetry.trace"},
        {&s_dropped_in_capture, "dropped_in_capture"},
        {&s_replayed_calls, "replayed_calls"},
        {&s_drain_in_python, "_drain"},
        {&s_enqueue_in_python, "_enqueue"},
        {&s_memory, "memory"},
        {&s_put, "put"},
        {&s_collect_in_python, "_collect"},
        {&s_on_forward_start, "_on_forward_start"},
        {&s_on_forward_end, "_on_forward_end"},
        {&s_on_backward_start, "_on_backward_start"},
        {&s_on_backward_end, "_on_backward_end"},
        {&s_on_step_start, "_on_step_start"},
        {&s_on_step_end, "_on_step_end"},
    };
    for (size_t i = 0; i < Py_ARRAY_LENGTH(names); i++)
        if ((*names[i].name = PyUnicode_InternFromString(names[i].text)) == NULL)
            return -1;
    PyObject *time = PyImport_ImportModule("time");
    if (time == NULL)
        return -1;
    perf_counter_ns = PyObject_GetAttrString(time, "perf_counter_ns");
    Py_DECREF(time);
    return perf_counter_ns == NULL ? -1 : 0;
}

PyMODINIT_FUNC
PyInit__hot_path(void)
{
    PyTypeObject *types[] = {
        &PhaseClock_Type,     &Hook_Type,         &RankSetFields_Type,    &GroupFields_Type,
        &CollectiveCall_Type,     &RecorderFields_Type, &WrapperState_Type,   &CallEnd_Type,
        &RecordedFunction_Type, &RecordedWait_Type,   &ScalarReader_Type,     &StepSlots_Type,
        &HookState_Type,      &HookedCall_Type,       &ShapeReader_Type,      &Constructor_Type,
        &MemoryHookFields_Type, &StepCollectorFields_Type, &EngineHookFields_Type,
        &InboxFields_Type,
    };
    if (make_names() < 0)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    int status = PyModule_AddIntConstant(module, "VERSION", VERSION);
    for (size_t i = 0; status == 0 && i < Py_ARRAY_LENGTH(types); i++)
        status = PyModule_AddType(module, types[i]);
    if (status < 0)
        Py_CLEAR(module);
    return module;
}
