// This thread's place among those that run a parallel region; one of one without OpenMP.
#pragma once

#include <cstdint>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace npuc {

#if defined(_OPENMP)
inline int64_t team() { return omp_get_num_threads(); }
inline int64_t member() { return omp_get_thread_num(); }
#else
inline int64_t team() { return 1; }
inline int64_t member() { return 0; }
#endif

}  // namespace npuc
