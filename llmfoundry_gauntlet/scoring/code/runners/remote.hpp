// Calls from a test's process to a completion's: arguments and results as plain values, in bytes.
#pragma once
#include <bits/stdc++.h>
#include <unistd.h>

namespace gauntlet {

inline int descriptor(const char* name) {
  const char* value = std::getenv(name);
  return value ? std::atoi(value) : -1;
}
inline int calls() { return descriptor("GAUNTLET_CALLS"); }
inline int results() { return descriptor("GAUNTLET_RESULTS"); }

constexpr std::uint64_t MAX_BYTES = 64u << 20;
constexpr int ENDED = 90, NOT_PLAIN = 91, NOT_ASKED = 92;  // exit statuses of a test without a result

// Bytes to send, or received. A test leaves when they are not what they should be.
struct Bytes {
  std::string data;
  std::size_t at = 0;

  void put(const void* from, std::size_t size) { data.append(static_cast<const char*>(from), size); }
  void get(void* to, std::size_t size) {
    if (size > data.size() - at) _exit(NOT_PLAIN);
    std::memcpy(to, data.data() + at, size);
    at += size;
  }
};

inline bool transfer_in(int descriptor, void* to, std::size_t size) {
  char* place = static_cast<char*>(to);
  while (size) {
    const ssize_t count = read(descriptor, place, size);
    if (count <= 0) return false;
    place += count;
    size -= count;
  }
  return true;
}

inline bool send(int descriptor, const Bytes& bytes) {
  const std::uint64_t length = bytes.data.size();
  std::string whole(reinterpret_cast<const char*>(&length), sizeof length);
  whole += bytes.data;
  for (std::size_t done = 0; done < whole.size();) {
    const ssize_t count = write(descriptor, whole.data() + done, whole.size() - done);
    if (count <= 0) return false;
    done += count;
  }
  return true;
}

inline bool receive(int descriptor, Bytes& bytes) {
  std::uint64_t length = 0;
  if (!transfer_in(descriptor, &length, sizeof length) || length > MAX_BYTES) return false;
  bytes.data.resize(length);
  bytes.at = 0;
  return transfer_in(descriptor, bytes.data.data(), length);
}

// Every kind of value that can cross has a put and a get.
template <class T, class = void>
struct Plain;

template <class T>
struct Plain<T, std::enable_if_t<std::is_arithmetic_v<T> && !std::is_same_v<T, bool>>> {
  static void put(Bytes& bytes, const T& value) { bytes.put(&value, sizeof value); }
  static void get(Bytes& bytes, T& value) {
    bytes.get(&value, sizeof value);
    if constexpr (std::is_floating_point_v<T>) {
      if (std::isnan(value)) _exit(NOT_PLAIN);  // it differs from nothing, as some tests compare
    }
  }
};

template <>
struct Plain<bool> {
  static void put(Bytes& bytes, const bool& value) {
    const unsigned char byte = value;
    bytes.put(&byte, 1);
  }
  static void get(Bytes& bytes, bool& value) {
    unsigned char byte = 0;
    bytes.get(&byte, 1);
    value = byte != 0;
  }
};

template <>
struct Plain<std::string> {
  static void put(Bytes& bytes, const std::string& value) {
    const std::uint64_t size = value.size();
    bytes.put(&size, sizeof size);
    bytes.put(value.data(), value.size());
  }
  static void get(Bytes& bytes, std::string& value) {
    std::uint64_t size = 0;
    bytes.get(&size, sizeof size);
    if (size > bytes.data.size() - bytes.at) _exit(NOT_PLAIN);
    value.assign(bytes.data, bytes.at, size);
    bytes.at += size;
  }
};

template <class A, class B>
struct Plain<std::pair<A, B>> {
  static void put(Bytes& bytes, const std::pair<A, B>& value) {
    Plain<std::remove_const_t<A>>::put(bytes, value.first);
    Plain<B>::put(bytes, value.second);
  }
  static void get(Bytes& bytes, std::pair<A, B>& value) {
    Plain<A>::get(bytes, value.first);
    Plain<B>::get(bytes, value.second);
  }
};

template <class... T>
struct Plain<std::tuple<T...>> {
  static void put(Bytes& bytes, const std::tuple<T...>& value) {
    std::apply([&](const T&... part) { (Plain<T>::put(bytes, part), ...); }, value);
  }
  static void get(Bytes& bytes, std::tuple<T...>& value) {
    std::apply([&](T&... part) { (Plain<T>::get(bytes, part), ...); }, value);
  }
};

// Containers: their size, then their items.
template <class C, class Item>
struct Sequence {
  static void put(Bytes& bytes, const C& value) {
    const std::uint64_t size = value.size();
    bytes.put(&size, sizeof size);
    for (const auto& item : value) Plain<Item>::put(bytes, item);
  }
  static void get(Bytes& bytes, C& value) {
    std::uint64_t size = 0;
    bytes.get(&size, sizeof size);
    if (size > bytes.data.size()) _exit(NOT_PLAIN);
    for (std::uint64_t index = 0; index < size; ++index) {
      Item item{};
      Plain<Item>::get(bytes, item);
      value.insert(value.end(), item);
    }
  }
};

template <class T>
struct Plain<std::vector<T>> : Sequence<std::vector<T>, T> {};
template <class T>
struct Plain<std::list<T>> : Sequence<std::list<T>, T> {};
template <class T>
struct Plain<std::deque<T>> : Sequence<std::deque<T>, T> {};
template <class T>
struct Plain<std::set<T>> : Sequence<std::set<T>, T> {};
template <class T>
struct Plain<std::unordered_set<T>> : Sequence<std::unordered_set<T>, T> {};
template <class K, class V>
struct Plain<std::map<K, V>> : Sequence<std::map<K, V>, std::pair<K, V>> {};
template <class K, class V>
struct Plain<std::unordered_map<K, V>> : Sequence<std::unordered_map<K, V>, std::pair<K, V>> {};

template <class T>
struct Plain<std::optional<T>> {
  static void put(Bytes& bytes, const std::optional<T>& value) {
    Plain<bool>::put(bytes, value.has_value());
    if (value) Plain<T>::put(bytes, *value);
  }
  static void get(Bytes& bytes, std::optional<T>& value) {
    bool there = false;
    Plain<bool>::get(bytes, there);
    if (there) Plain<T>::get(bytes, value.emplace());
  }
};

inline int num_calls = 0;

// A test that makes no call proves nothing.
struct Asked {
  ~Asked() {
    if (num_calls == 0) _exit(NOT_ASKED);
  }
};

// In the test's process: what the completion's function returns for these arguments.
template <class R, class... A>
R call(const A&... arguments) {
  ++num_calls;
  Bytes bytes;
  (Plain<A>::put(bytes, arguments), ...);
  if (!send(calls(), bytes) || !receive(results(), bytes)) _exit(ENDED);
  if constexpr (!std::is_void_v<R>) {
    std::decay_t<R> value{};
    Plain<std::decay_t<R>>::get(bytes, value);
    if (bytes.at != bytes.data.size()) _exit(NOT_PLAIN);
    return value;
  }
}

// In the completion's process: answers calls until there are no more.
template <class R, class... A>
int serve(R (*function)(A...)) {
  Bytes bytes;
  while (receive(calls(), bytes)) {
    std::tuple<std::decay_t<A>...> arguments;
    Plain<decltype(arguments)>::get(bytes, arguments);
    Bytes result;
    if constexpr (std::is_void_v<R>) {
      std::apply([&](std::decay_t<A>&... part) { function(static_cast<A>(part)...); }, arguments);
    } else {
      Plain<std::decay_t<R>>::put(
          result, std::apply([&](auto&... part) { return function(static_cast<A>(part)...); }, arguments));
    }
    if (!send(results(), result)) break;
  }
  return 0;
}

}  // namespace gauntlet
