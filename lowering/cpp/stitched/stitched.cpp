// A model for torch's package loader that runs other models: the bodies of a graph, in the order of the program beside this library.
//
// The program is 32-bit integers (lowering/backends/inductor/program.py): a mark, the numbers of operands, results, values and models,
// then one record a call, then the results, then the bytes of each model. Values are handles of tensors; one is freed, or given away, where it is read last.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_runtime/interface.h>

#include <cstdio>
#include <fstream>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr int32_t MARK = 0x4e505543, VERSION = 1;

std::string& last_error() {
    static thread_local std::string text;
    return text;
}

// Gives Python's lock away, if this thread has it: torch's loader keeps it while a model runs, and no other thread of a server could work
// meanwhile. Python is found where this process has one; nothing is linked with it.
class WithoutPython {
   public:
    WithoutPython() {
        const auto held = function<int()>("PyGILState_Check");
        const auto release = function<void*()>("PyEval_SaveThread");
        if (held && release && held()) state_ = release();
    }
    ~WithoutPython() {
        if (state_) function<void(void*)>("PyEval_RestoreThread")(state_);
    }
    WithoutPython(const WithoutPython&) = delete;
    WithoutPython& operator=(const WithoutPython&) = delete;

   private:
    template <typename Signature>
    static Signature* function(const char* name) {
        return reinterpret_cast<Signature*>(dlsym(RTLD_DEFAULT, name));
    }

    void* state_ = nullptr;
};

template <typename Body>
AOTIRuntimeError guarded(Body body) {
    try {
        body();
        return AOTI_RUNTIME_SUCCESS;
    } catch (const std::exception& error) {
        last_error() = error.what();
    } catch (...) {
        last_error() = "unknown error";
    }
    // As torch's own models do: a runner without the function for messages says no more than that a call failed.
    std::fprintf(stderr, "Error: %s\n", last_error().c_str());
    return AOTI_RUNTIME_FAILURE;
}

void check(AOTITorchError error, const char* what) {
    if (error != AOTI_TORCH_SUCCESS) throw std::runtime_error(what);
}

AtenTensorHandle copied(AtenTensorHandle handle) {
    AtenTensorHandle copy;
    check(aoti_torch_new_tensor_handle(handle, &copy), "a handle cannot be copied");
    return copy;
}

// Handles that are deleted unless they are taken.
struct Handles {
    std::vector<AtenTensorHandle> all;

    explicit Handles(size_t count) : all(count, nullptr) {}
    Handles(const Handles&) = delete;
    ~Handles() {
        for (AtenTensorHandle handle : all)
            if (handle) aoti_torch_delete_tensor_object(handle);
    }
    AtenTensorHandle take(size_t at) {
        AtenTensorHandle handle = all[at];
        all[at] = nullptr;
        return handle;
    }
};

// A compiled body, which exports the functions of body.h.
struct Model {
    void *library, *body = nullptr;
    int (*run)(void*, AtenTensorHandle*, AtenTensorHandle*);
    int (*remove)(void*);
    const char* (*error)();

    Model(const std::string& path, size_t inputs, size_t outputs) : library(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
        if (!library) throw std::runtime_error(dlerror());
        int (*create)(void**, size_t*, size_t*);
        find(create, "npuc_body_create");
        find(run, "npuc_body_run");
        find(remove, "npuc_body_delete");
        find(error, "npuc_body_error");
        size_t takes, gives;
        if (create(&body, &takes, &gives)) throw std::runtime_error(path + " cannot be opened: " + error());
        if (takes != inputs || gives != outputs) throw std::runtime_error(path + " is not the body that the program calls");
    }
    Model(const Model&) = delete;
    // A library stays, as torch's own do: what it gave to the process, such as threads' errors, may be asked for later.
    ~Model() {
        if (body) remove(body);
    }
    template <typename Function>
    void find(Function& function, const char* name) {
        function = reinterpret_cast<Function>(dlsym(library, name));
        if (!function) throw std::runtime_error(std::string("a body has no ") + name);
    }
};

// Gradients are off while it lives.
struct NoGrad {
    bool before = aoti_torch_grad_mode_is_enabled();
    NoGrad() { aoti_torch_grad_mode_set_enabled(false); }
    ~NoGrad() { aoti_torch_grad_mode_set_enabled(before); }
};

// What a call or a result reads: a value, and whether it is read last and so given away.
struct Read {
    int32_t value;
    bool last;
};

struct Call {
    size_t model;
    std::vector<Read> reads;
    std::vector<int32_t> results;  // -1: nobody reads it
};

// The numbers of a program, read in order and checked.
struct Reader {
    std::ifstream file;

    explicit Reader(const std::string& path) : file(path, std::ios::binary) {
        if (!file) throw std::runtime_error(path + " cannot be read");
    }
    int32_t number(int32_t least, int32_t most) {
        int32_t value;
        if (!file.read(reinterpret_cast<char*>(&value), sizeof value)) throw std::runtime_error("the program ends too early");
        if (value < least || value > most) throw std::runtime_error("the program has " + std::to_string(value) + " where it cannot be");
        return value;
    }
    int32_t count() { return number(0, 1 << 20); }
    Read read(int32_t values) {
        const int32_t value = number(0, values - 1);
        return {value, number(0, 1) == 1};
    }
};

struct Program {
    size_t inputs, values;
    std::vector<Call> calls;
    std::vector<Read> results;
    std::vector<std::unique_ptr<Model>> models;
    std::mutex running;

    explicit Program(const std::string& folder) {
        Reader from(folder + "/program.bin");
        from.number(MARK, MARK), from.number(VERSION, VERSION);
        inputs = from.count();
        const int32_t outputs = from.count();
        values = from.count();
        for (int32_t i = 0, count = from.count(); i < count; i++) {
            const int32_t takes = from.count(), gives = from.count();
            sizes.emplace_back(takes, gives);
        }
        for (int32_t i = 0, count = from.count(); i < count; i++) calls.push_back(call(from));
        for (int32_t i = 0; i < outputs; i++) results.push_back(from.read(values));
        for (size_t i = 0; i < sizes.size(); i++) {
            const std::string path = folder + "/body" + std::to_string(i) + ".bin";
            const int32_t bytes = from.number(0, INT32_MAX);
            std::ifstream body(path, std::ios::binary | std::ios::ate);
            // Reading a library that was cut off would end the process.
            if (!body || body.tellg() != bytes) throw std::runtime_error(path + " has not the size that the program says");
            models.push_back(std::make_unique<Model>(path, sizes[i].first, sizes[i].second));
        }
        if (from.file.peek() != EOF) throw std::runtime_error("the program has more numbers than it needs");
    }

    // Results are new handles; the operands' are freed, whatever happens.
    void run(AtenTensorHandle* operands, AtenTensorHandle* outputs) {
        Handles held(values);
        std::copy(operands, operands + inputs, held.all.begin());
        std::lock_guard<std::mutex> lock(running);
        NoGrad no_grad;
        std::vector<AtenTensorHandle> gives;
        for (const Call& call : calls) {
            Handles takes(call.reads.size());
            for (size_t i = 0; i < call.reads.size(); i++) takes.all[i] = value(held, call.reads[i]);
            gives.assign(call.results.size(), nullptr);
            const Model& model = *models[call.model];
            // The handles are the model's, also where it fails.
            std::vector<AtenTensorHandle> given(std::move(takes.all));
            takes.all.clear();
            if (model.run(model.body, given.data(), gives.data()))
                throw std::runtime_error("body " + std::to_string(call.model) + ": " + model.error());
            for (size_t i = 0; i < gives.size(); i++)
                if (call.results[i] >= 0) held.all[call.results[i]] = gives[i];
                else aoti_torch_delete_tensor_object(gives[i]);
        }
        Handles returned(results.size());
        for (size_t i = 0; i < results.size(); i++) returned.all[i] = value(held, results[i]);
        for (size_t i = 0; i < results.size(); i++) outputs[i] = returned.take(i);
    }

  private:
    std::vector<std::pair<int32_t, int32_t>> sizes;

    Call call(Reader& from) {
        Call call{static_cast<size_t>(from.number(0, static_cast<int32_t>(sizes.size()) - 1)), {}, {}};
        const auto [takes, gives] = sizes[call.model];
        for (int32_t i = 0; i < takes; i++) call.reads.push_back(from.read(values));
        for (int32_t i = 0; i < gives; i++) call.results.push_back(from.number(-1, static_cast<int32_t>(values) - 1));
        return call;
    }

    static AtenTensorHandle value(Handles& held, const Read& read) {
        if (!held.all[read.value]) throw std::runtime_error("the program reads value " + std::to_string(read.value) + " too late or too early");
        return read.last ? held.take(read.value) : copied(held.all[read.value]);
    }
};

std::string folder() {
    Dl_info info;
    if (!dladdr(reinterpret_cast<void*>(&folder), &info)) throw std::runtime_error("this library has no path");
    const std::string path(info.dli_fname);
    return path.substr(0, path.find_last_of('/'));
}

Program& program_of(AOTInductorModelContainerHandle handle) { return *reinterpret_cast<Program*>(handle); }

}  // namespace

extern "C" {

AOTIRuntimeError AOTInductorModelContainerCreateWithDevice(
    AOTInductorModelContainerHandle* handle, size_t, const char*, const char*) {
    return guarded([&] { *handle = reinterpret_cast<AOTInductorModelContainerHandle>(new Program(folder())); });
}

AOTIRuntimeError AOTInductorModelContainerDelete(AOTInductorModelContainerHandle handle) {
    return guarded([&] { delete &program_of(handle); });
}

AOTIRuntimeError AOTInductorModelContainerRun(
    AOTInductorModelContainerHandle handle, AtenTensorHandle* inputs, size_t num_inputs, AtenTensorHandle* outputs, size_t num_outputs,
    AOTInductorStreamHandle, AOTIProxyExecutorHandle) {
    return guarded([&] {
        Program& program = program_of(handle);
        if (num_inputs != program.inputs || num_outputs != program.results.size())
            throw std::runtime_error(
                std::to_string(num_inputs) + " operands and " + std::to_string(num_outputs) + " results, the program has " +
                std::to_string(program.inputs) + " and " + std::to_string(program.results.size()));
        const WithoutPython unlocked;
        program.run(inputs, outputs);
    });
}

AOTIRuntimeError AOTInductorModelContainerRunSingleThreaded(
    AOTInductorModelContainerHandle handle, AtenTensorHandle* inputs, size_t num_inputs, AtenTensorHandle* outputs, size_t num_outputs,
    AOTInductorStreamHandle stream, AOTIProxyExecutorHandle proxy) {
    return AOTInductorModelContainerRun(handle, inputs, num_inputs, outputs, num_outputs, stream, proxy);
}

AOTIRuntimeError AOTInductorModelContainerGetNumInputs(AOTInductorModelContainerHandle handle, size_t* count) {
    return *count = program_of(handle).inputs, AOTI_RUNTIME_SUCCESS;
}

AOTIRuntimeError AOTInductorModelContainerGetNumOutputs(AOTInductorModelContainerHandle handle, size_t* count) {
    return *count = program_of(handle).results.size(), AOTI_RUNTIME_SUCCESS;
}

// Parameters are operands, so there are no constants to ask for or to change.
AOTIRuntimeError AOTInductorModelContainerGetNumConstants(AOTInductorModelContainerHandle, size_t* count) {
    return *count = 0, AOTI_RUNTIME_SUCCESS;
}

AOTIRuntimeError AOTInductorModelContainerGetConstantName(AOTInductorModelContainerHandle, size_t, const char**) {
    return AOTI_RUNTIME_FAILURE;
}

AOTIRuntimeError AOTInductorModelContainerGetConstantOriginalFQN(AOTInductorModelContainerHandle, size_t, const char**) {
    return AOTI_RUNTIME_FAILURE;
}

AOTIRuntimeError AOTInductorModelContainerGetConstantDtype(AOTInductorModelContainerHandle, size_t, int32_t*) {
    return AOTI_RUNTIME_FAILURE;
}

AOTIRuntimeError AOTInductorModelContainerUpdateConstantBuffer(
    AOTInductorModelContainerHandle, AOTInductorConstantMapHandle, bool, bool) {
    return AOTI_RUNTIME_FAILURE;
}

AOTIRuntimeError AOTInductorModelContainerUpdateInactiveConstantBuffer(AOTInductorModelContainerHandle, AOTInductorConstantMapHandle) {
    return AOTI_RUNTIME_FAILURE;
}

AOTIRuntimeError AOTInductorModelContainerUpdateUserManagedConstantBuffer(
    AOTInductorModelContainerHandle, AOTInductorConstantMapHandle, bool, bool) {
    return AOTI_RUNTIME_FAILURE;
}

AOTIRuntimeError AOTInductorModelContainerUpdateConstantBufferFromCpu(
    AOTInductorModelContainerHandle, AOTInductorConstantMapHandle, bool, bool) {
    return AOTI_RUNTIME_FAILURE;
}

AOTIRuntimeError AOTInductorModelContainerExtractConstantsMap(AOTInductorModelContainerHandle, AOTInductorConstantMapHandle, bool) {
    return AOTI_RUNTIME_FAILURE;
}

AOTIRuntimeError AOTInductorModelContainerGetConstantsBlobSize(AOTInductorModelContainerHandle, uint64_t* size) {
    return *size = 0, AOTI_RUNTIME_SUCCESS;
}

AOTIRuntimeError AOTInductorModelUpdateConstantsFromBlob(AOTInductorModelContainerHandle, const uint8_t*) { return AOTI_RUNTIME_FAILURE; }

AOTIRuntimeError AOTInductorModelContainerFreeInactiveConstantBuffer(AOTInductorModelContainerHandle) { return AOTI_RUNTIME_SUCCESS; }

AOTIRuntimeError AOTInductorModelContainerRunConstantFolding(
    AOTInductorModelContainerHandle, bool, AOTInductorStreamHandle, AOTIProxyExecutorHandle) {
    return AOTI_RUNTIME_SUCCESS;
}

AOTIRuntimeError AOTInductorModelContainerSwapConstantBuffer(AOTInductorModelContainerHandle) { return AOTI_RUNTIME_SUCCESS; }

AOTIRuntimeError AOTInductorModelContainerGetCallSpec(AOTInductorModelContainerHandle, const char** in, const char** out) {
    return *in = "", *out = "", AOTI_RUNTIME_SUCCESS;
}

AOTIRuntimeError AOTInductorGetLastError(const char** text) { return *text = last_error().c_str(), AOTI_RUNTIME_SUCCESS; }

}  // extern "C"
