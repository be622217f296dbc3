// Memory that a thread keeps between calls, so that a call does not ask the operating system for pages.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace npuc {

// One such piece of memory, aligned to cache lines; its contents are lost when it grows.
class Scratch {
   public:
    ~Scratch() { std::free(data_); }

    void* get(int64_t bytes) {
        if (bytes > size_) {
            std::free(data_);
            size_ = 0;
            data_ = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
            if (!data_) throw std::bad_alloc();
            size_ = bytes;
        }
        return data_;
    }

   private:
    void* data_ = nullptr;
    int64_t size_ = 0;
};

}  // namespace npuc
