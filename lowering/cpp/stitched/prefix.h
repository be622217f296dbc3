// The header that is precompiled for the generated code of bodies, in the place of torch's own, which it includes. A function of torch's
// that no body calls uses std::regex, and a compiler would instantiate its templates in every body: half of the seconds of a small one.
#include <regex>

#ifdef __GLIBCXX__
namespace std {

extern template class basic_regex<char, regex_traits<char>>;

namespace __detail {

using NpucText = string::const_iterator;
using NpucMatches = allocator<sub_match<NpucText>>;

extern template class _Compiler<regex_traits<char>>;
extern template class _Scanner<char>;
extern template class _NFA<regex_traits<char>>;
extern template class _Executor<NpucText, NpucMatches, regex_traits<char>, true>;
extern template class _Executor<NpucText, NpucMatches, regex_traits<char>, false>;

}  // namespace __detail
}  // namespace std
#endif

#include <torch/csrc/inductor/aoti_include/cpu.h>
