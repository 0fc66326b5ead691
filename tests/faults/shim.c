/* Counts the I/O operations of this process below one folder and strikes at the N-th. Loaded with LD_PRELOAD, so that
 * it sees Python, Rust and C++ code alike; does nothing until faults_arm is called.
 *
 * Modes up to RECORD_READS strike at operations that a later reader of the folder could notice: create, write, rename,
 * fsync, truncate, mkdir, unlink, close, a shared writable mapping. The modes after it strike at reads: an open for
 * reading, read, mmap, stat, access, readlink, and the listing of a folder. A mode counts only its own kind.
 *
 * Not seen: loads and stores in a mapping (only mmap and msync are), io_uring, system calls made without the C library (the
 * rename at the end of safetensors' own save_file is one), and what the C library calls inside itself (a FILE's buffer
 * reaches the disk within fwrite, fflush or fclose, and those are counted).
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* The order of MODES in harness.py. After the last one here each error number comes twice: once, and from here on. */
enum { RECORD, KILL, TORN, SHORT, FULL_ONCE, FULL, BROKEN_ONCE, BROKEN, RECORD_READS, FIRST_UNREAD };
static const int UNREAD[] = { EIO, EMFILE, ENOMEM, ESTALE, EINTR };
enum { PROCEED, HALF, HALF_THEN_DIE, FAIL };
/* What an operation is to the disk. An open for reading has READS and OPENS, since the write modes count it too. */
enum { CREATES = 1, WRITES = 2, SYNCS = 4, FREES = 8, CHANGES = 15, READS = 16, OPENS = 32 };

static char root[PATH_MAX], victim[PATH_MAX];
static size_t root_length;
static int armed, mode;
static long strike_at, counted, struck;
static char journal[1 << 22];
static size_t journal_length;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void faults_arm(const char *folder, int how, long at) {
    snprintf(root, sizeof root, "%s/", folder);
    root_length = strlen(root);
    mode = how, strike_at = at, counted = struck = 0, journal_length = 0, journal[0] = victim[0] = 0;
    armed = 1;
}
void faults_disarm(void) { armed = 0; }
long faults_struck(void) { return struck; }
const char *faults_journal(void) { return journal; }

static int reading_mode(void) { return mode >= RECORD_READS; }
static int reason(void) {
    if (mode >= FIRST_UNREAD) return UNREAD[(mode - FIRST_UNREAD) / 2];
    return mode == FULL_ONCE || mode == FULL ? ENOSPC : EIO;
}
static void die(void) { kill(getpid(), SIGKILL); for (;;) pause(); }

/* Counts one operation and says what shall become of it. Journal: one line each, name TAB path TAB detail. */
static int strike(const char *name, int kind, const char *path, const char *detail) {
    int verdict = PROCEED;
    if (reading_mode() ? !(kind & READS) : kind == READS) return PROCEED;
    pthread_mutex_lock(&lock);
    counted++;
    journal_length += snprintf(journal + journal_length, sizeof journal - journal_length, "%s\t%s\t%s\n", name,
                               path + root_length, detail);
    if (journal_length >= sizeof journal) abort();
    int here = counted == strike_at, since = strike_at && counted >= strike_at;
    if (here && mode == KILL) die();
    if (here && mode == TORN) verdict = HALF_THEN_DIE;
    if (here && mode == SHORT) verdict = HALF;
    if (here && (mode == FULL_ONCE || mode == BROKEN_ONCE)) verdict = FAIL;
    if (since && mode == FULL && (kind & (CREATES | WRITES | SYNCS))) verdict = FAIL;   /* a full disk can still delete */
    if (since && mode == BROKEN && (kind & CHANGES)) verdict = FAIL;                    /* and a broken one only be read */
    if (since && mode >= FIRST_UNREAD) {
        if (here) strcpy(victim, path);
        int lasts = (mode - FIRST_UNREAD) % 2, of_the_process = reason() == EMFILE || reason() == ENOMEM;
        if (here || (lasts && (of_the_process || !strcmp(victim, path)))) verdict = FAIL;
    }
    if (verdict != PROCEED) struck++;
    pthread_mutex_unlock(&lock);
    if (verdict == FAIL) errno = reason();
    return verdict;
}

static int below(const char *path) {
    return !strncmp(path, root, root_length) || (!strncmp(path, root, root_length - 1) && !path[root_length - 1]);
}

/* Absolute path of what a call names, if it is below the root; the root itself gets a trailing slash. */
static int resolve(int folder, const char *name, char *path) {
    int saved = errno, inside = 0;
    char base[PATH_MAX] = "", link[64];
    if (!armed) return 0;
    if (name == NULL || name[0] != '/') {
        if (name && folder == AT_FDCWD) {
            if (!getcwd(base, sizeof base)) goto out;
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
            ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, base, sizeof base - 1);
            if (length < 0) goto out;
            base[length] = 0;
        }
    }
    size_t needed = strlen(base) + (name ? strlen(name) : 0) + 3;
    if (needed > PATH_MAX) goto out;
    strcpy(path, base);
    if (name && base[0]) strcat(path, "/");
    if (name) strcat(path, name);
    inside = below(path);
    if (inside && !path[root_length - 1]) strcat(path, "/");
out:
    errno = saved;
    return inside;
}

#define COMMA ,
#define REAL(name) ({ static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name); real; })

/* ---- opening and closing ------------------------------------------------------------------------------------- */

static int opening(int folder, const char *name, int flags) {
    char path[PATH_MAX];
    if (!resolve(folder, name, path)) return PROCEED;
    int creates = flags & (O_CREAT | O_TRUNC);
    int kind = (creates ? CREATES : OPENS) | ((flags & O_ACCMODE) == O_WRONLY ? 0 : READS);
    return strike(creates ? "create" : "open", kind, path, flags & O_TRUNC ? "truncating" : "");
}

#define MODE_OF(flags) int bits = 0; if (flags & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, flags); \
    bits = va_arg(rest, int); va_end(rest); }
#define OPEN(name) int name(const char *path, int flags, ...) { MODE_OF(flags) \
    return opening(AT_FDCWD, path, flags) == FAIL ? -1 : REAL(name)(path, flags, bits); }
#define OPENAT(name) int name(int folder, const char *path, int flags, ...) { MODE_OF(flags) \
    return opening(folder, path, flags) == FAIL ? -1 : REAL(name)(folder, path, flags, bits); }
#define FOPEN(name) FILE *name(const char *path, const char *how) { \
    int flags = how[0] == 'r' ? 0 : how[0] == 'w' ? O_WRONLY | O_CREAT | O_TRUNC : O_WRONLY | O_CREAT; \
    return opening(AT_FDCWD, path, flags) == FAIL ? NULL : REAL(name)(path, how); }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64) FOPEN(fopen) FOPEN(fopen64)

int creat(const char *path, mode_t bits) { return open(path, O_CREAT | O_WRONLY | O_TRUNC, bits); }

static int on_descriptor(const char *name, int kind, int descriptor, const char *detail) {
    char path[PATH_MAX];
    return resolve(descriptor, NULL, path) ? strike(name, kind, path, detail) : PROCEED;
}

int close(int descriptor) {                              /* of what was only read: cannot fail, and changes nothing */
    int written = armed && (fcntl(descriptor, F_GETFL) & O_ACCMODE) != O_RDONLY;
    int verdict = written ? on_descriptor("close", 0, descriptor, "") : PROCEED;
    int result = REAL(close)(descriptor);               /* a failing close still closes */
    if (verdict == FAIL) { errno = reason(); return -1; }
    return result;
}

int fclose(FILE *file) {
    int verdict = on_descriptor("fclose", WRITES, fileno(file), "");
    int result = REAL(fclose)(file);
    if (verdict == FAIL) { errno = reason(); return EOF; }
    return result;
}

/* ---- writing ------------------------------------------------------------------------------------------------- */

static int writing(const char *name, int descriptor, size_t length) {
    char detail[32];
    snprintf(detail, sizeof detail, "%zu", length);
    return on_descriptor(name, WRITES, descriptor, detail);
}

/* Runs `call` with `length` halved if the verdict says so (half of a single byte is that byte). */
#define WRITE(verdict, length, call) ({ __typeof__(call) moved = -1; int judged = (verdict); \
    if (judged == HALF || judged == HALF_THEN_DIE) { length = (length + 1) / 2; } \
    if (judged != FAIL) { moved = (call); } \
    if (judged == HALF_THEN_DIE) { die(); } \
    moved; })

ssize_t write(int descriptor, const void *data, size_t length) {
    return WRITE(writing("write", descriptor, length), length, REAL(write)(descriptor, data, length));
}
#define PWRITE(name, offset_type) ssize_t name(int descriptor, const void *data, size_t length, offset_type offset) { \
    return WRITE(writing("pwrite", descriptor, length), length, REAL(name)(descriptor, data, length, offset)); }
PWRITE(pwrite, off_t) PWRITE(pwrite64, off64_t)

size_t fwrite(const void *data, size_t size, size_t count, FILE *file) {
    int verdict = armed ? writing("fwrite", fileno(file), size * count) : PROCEED;
    if (verdict == FAIL) return 0;
    if (verdict == HALF_THEN_DIE) { REAL(fwrite)(data, 1, (size * count + 1) / 2, file); fflush(file); die(); }
    return REAL(fwrite)(data, size, count, file);
}

int fflush(FILE *file) {
    return armed && file && on_descriptor("fflush", WRITES, fileno(file), "") == FAIL ? EOF : REAL(fflush)(file);
}

static size_t total(const struct iovec *pieces, int count) {
    size_t sum = 0;
    for (int i = 0; i < count; i++) sum += pieces[i].iov_len;
    return sum;
}

/* The vector's first `length` bytes; returns the count of pieces. */
static int cut(const struct iovec *pieces, int count, size_t length, struct iovec *kept) {
    int used = 0;
    for (; used < count && length; used++) {
        kept[used] = pieces[used];
        if (kept[used].iov_len > length) kept[used].iov_len = length;
        length -= kept[used].iov_len;
    }
    return used;
}

#define VECTORED(name, label, parameters, arguments) ssize_t name(int descriptor, const struct iovec *pieces, int count parameters) { \
    struct iovec kept[IOV_MAX]; \
    if (!armed || count > IOV_MAX) return REAL(name)(descriptor, pieces, count arguments); \
    size_t length = total(pieces, count); \
    return WRITE(writing(label, descriptor, length), length, \
                 (count = cut(pieces, count, length, kept), pieces = kept, REAL(name)(descriptor, pieces, count arguments))); }
VECTORED(writev, "writev", , )
VECTORED(pwritev, "pwritev", COMMA off_t offset, COMMA offset)
VECTORED(pwritev64, "pwritev", COMMA off64_t offset, COMMA offset)
VECTORED(pwritev2, "pwritev", COMMA off_t offset COMMA int flags, COMMA offset COMMA flags)
VECTORED(pwritev64v2, "pwritev", COMMA off64_t offset COMMA int flags, COMMA offset COMMA flags)

/* Callers ask for more than the source holds: the half of a copy is the half of what is there. */
static size_t available(int from, off64_t at, size_t length) {
    struct stat64 source;
    if (!armed || reading_mode() || fstat64(from, &source) || !S_ISREG(source.st_mode)) return length;
    off64_t left = source.st_size > at ? source.st_size - at : 0;
    return length < (size_t)left ? length : (size_t)left;
}
#define COPIED(from, offset, length) available(from, offset ? *offset : lseek64(from, 0, SEEK_CUR), length)

#define SENDFILE(name, offset_type) ssize_t name(int to, int from, offset_type *offset, size_t length) { \
    if (on_descriptor("sendfile", READS, from, "") == FAIL) return -1; \
    length = COPIED(from, offset, length); \
    return WRITE(writing("sendfile", to, length), length, REAL(name)(to, from, offset, length)); }
ssize_t sendfile(int, int, off_t *, size_t);
ssize_t sendfile64(int, int, off64_t *, size_t);
SENDFILE(sendfile, off_t) SENDFILE(sendfile64, off64_t)

ssize_t copy_file_range(int from, off64_t *from_at, int to, off64_t *to_at, size_t length, unsigned flags) {
    if (on_descriptor("copy_file_range", READS, from, "") == FAIL) return -1;
    length = COPIED(from, from_at, length);
    return WRITE(writing("copy_file_range", to, length), length,
                 REAL(copy_file_range)(from, from_at, to, to_at, length, flags));
}

#define SIZED(name, label, offset_type) int name(int descriptor, offset_type length) { \
    return on_descriptor(label, WRITES, descriptor, "") == FAIL ? -1 : REAL(name)(descriptor, length); }
SIZED(ftruncate, "ftruncate", off_t) SIZED(ftruncate64, "ftruncate", off64_t)

#define ALLOCATE(name, offset_type) int name(int descriptor, offset_type offset, offset_type length) { \
    return on_descriptor("fallocate", WRITES, descriptor, "") == FAIL ? errno : REAL(name)(descriptor, offset, length); }
ALLOCATE(posix_fallocate, off_t) ALLOCATE(posix_fallocate64, off64_t)

/* A syscall instead of dlsym: mmap is called before dlsym can be. */
static void *mapping(void *at, size_t length, int access, int flags, int descriptor, off64_t offset) {
    int stores = (flags & MAP_TYPE) != MAP_PRIVATE && (access & PROT_WRITE);
    if (armed && descriptor >= 0
        && on_descriptor("mmap", stores ? WRITES | READS : READS, descriptor, "") == FAIL) return MAP_FAILED;
    return (void *)syscall(SYS_mmap, at, length, access, flags, descriptor, offset);
}
void *mmap(void *at, size_t length, int access, int flags, int descriptor, off_t offset) {
    return mapping(at, length, access, flags, descriptor, offset);
}
void *mmap64(void *at, size_t length, int access, int flags, int descriptor, off64_t offset) {
    return mapping(at, length, access, flags, descriptor, offset);
}

/* Which file a mapping belongs to is not known here: counted as an operation of the root itself. */
int msync(void *at, size_t length, int flags) {
    return armed && strike("msync", SYNCS, root, "") == FAIL ? -1 : REAL(msync)(at, length, flags);
}

/* ---- syncing: counted, may fail, but not carried out, since killing a process loses nothing of the page cache ----- */

#define SYNC(name) int name(int descriptor) { char path[PATH_MAX]; \
    if (!resolve(descriptor, NULL, path)) return REAL(name)(descriptor); \
    return strike("fsync", SYNCS, path, "") == FAIL ? -1 : 0; }
SYNC(fsync) SYNC(fdatasync)

/* ---- names --------------------------------------------------------------------------------------------------- */

static int named(const char *name, int kind, int folder, const char *path) {
    char full[PATH_MAX];
    return resolve(folder, path, full) ? strike(name, kind, full, "") : PROCEED;
}

static int renaming(int from_folder, const char *from, int to_folder, const char *to) {
    char source[PATH_MAX], target[PATH_MAX];
    int within = resolve(from_folder, from, source), into = resolve(to_folder, to, target);
    if (!within && !into) return PROCEED;
    return strike("rename", CREATES, within ? source : target, into ? target + root_length : "(outside)");
}

int rename(const char *from, const char *to) {
    return renaming(AT_FDCWD, from, AT_FDCWD, to) == FAIL ? -1 : REAL(rename)(from, to);
}
int renameat(int from_folder, const char *from, int to_folder, const char *to) {
    return renaming(from_folder, from, to_folder, to) == FAIL ? -1 : REAL(renameat)(from_folder, from, to_folder, to);
}
int renameat2(int from_folder, const char *from, int to_folder, const char *to, unsigned flags) {
    if (renaming(from_folder, from, to_folder, to) == FAIL) return -1;
    return REAL(renameat2)(from_folder, from, to_folder, to, flags);
}
int mkdir(const char *path, mode_t bits) {
    return named("mkdir", CREATES, AT_FDCWD, path) == FAIL ? -1 : REAL(mkdir)(path, bits);
}
int mkdirat(int folder, const char *path, mode_t bits) {
    return named("mkdir", CREATES, folder, path) == FAIL ? -1 : REAL(mkdirat)(folder, path, bits);
}
int unlink(const char *path) { return named("unlink", FREES, AT_FDCWD, path) == FAIL ? -1 : REAL(unlink)(path); }
int rmdir(const char *path) { return named("rmdir", FREES, AT_FDCWD, path) == FAIL ? -1 : REAL(rmdir)(path); }
int unlinkat(int folder, const char *path, int flags) {
    return named(flags & AT_REMOVEDIR ? "rmdir" : "unlink", FREES, folder, path) == FAIL
        ? -1 : REAL(unlinkat)(folder, path, flags);
}

/* ---- reading ------------------------------------------------------------------------------------------------- */

#define READING(name, type, label, parameters, arguments) type name(int descriptor, parameters) { \
    return on_descriptor(label, READS, descriptor, "") == FAIL ? -1 : REAL(name)(descriptor, arguments); }
READING(read, ssize_t, "read", void *data COMMA size_t length, data COMMA length)
READING(pread, ssize_t, "read", void *data COMMA size_t length COMMA off_t at, data COMMA length COMMA at)
READING(pread64, ssize_t, "read", void *data COMMA size_t length COMMA off64_t at, data COMMA length COMMA at)
READING(readv, ssize_t, "read", const struct iovec *to COMMA int count, to COMMA count)
READING(preadv, ssize_t, "read", const struct iovec *to COMMA int count COMMA off_t at, to COMMA count COMMA at)
READING(preadv64, ssize_t, "read", const struct iovec *to COMMA int count COMMA off64_t at, to COMMA count COMMA at)
READING(preadv2, ssize_t, "read", const struct iovec *to COMMA int count COMMA off_t at COMMA int flags,
        to COMMA count COMMA at COMMA flags)
READING(preadv64v2, ssize_t, "read", const struct iovec *to COMMA int count COMMA off64_t at COMMA int flags,
        to COMMA count COMMA at COMMA flags)

size_t fread(void *data, size_t size, size_t count, FILE *file) {
    if (!armed || on_descriptor("read", READS, fileno(file), "") != FAIL) return REAL(fread)(data, size, count, file);
    file->_flags |= 0x20;                                /* what ferror looks at; without it this were the file's end */
    return 0;
}

#define STAT(name, type) int name(const char *path, type *found) { \
    return named("stat", READS, AT_FDCWD, path) == FAIL ? -1 : REAL(name)(path, found); }
STAT(stat, struct stat) STAT(stat64, struct stat64) STAT(lstat, struct stat) STAT(lstat64, struct stat64)
#define FSTAT(name, type) int name(int descriptor, type *found) { \
    return on_descriptor("stat", READS, descriptor, "") == FAIL ? -1 : REAL(name)(descriptor, found); }
FSTAT(fstat, struct stat) FSTAT(fstat64, struct stat64)

/* An empty name with AT_EMPTY_PATH means the descriptor itself. */
static int looking(int folder, const char *path) { return named("stat", READS, folder, path && path[0] ? path : NULL); }
#define FSTATAT(name, type) int name(int folder, const char *path, type *found, int flags) { \
    return looking(folder, path) == FAIL ? -1 : REAL(name)(folder, path, found, flags); }
FSTATAT(fstatat, struct stat) FSTATAT(fstatat64, struct stat64)
int statx(int folder, const char *path, int flags, unsigned mask, struct statx *found) {
    return looking(folder, path) == FAIL ? -1 : REAL(statx)(folder, path, flags, mask, found);
}

/* The names of these that programs use which were linked against a C library before 2.33. */
#define XSTAT(name, type) int name(int version, const char *path, type *found); \
    int name(int version, const char *path, type *found) { \
    return named("stat", READS, AT_FDCWD, path) == FAIL ? -1 : REAL(name)(version, path, found); }
XSTAT(__xstat, struct stat) XSTAT(__xstat64, struct stat64) XSTAT(__lxstat, struct stat) XSTAT(__lxstat64, struct stat64)
#define FXSTAT(name, type) int name(int version, int descriptor, type *found); \
    int name(int version, int descriptor, type *found) { \
    return on_descriptor("stat", READS, descriptor, "") == FAIL ? -1 : REAL(name)(version, descriptor, found); }
FXSTAT(__fxstat, struct stat) FXSTAT(__fxstat64, struct stat64)

int access(const char *path, int how) {
    return named("access", READS, AT_FDCWD, path) == FAIL ? -1 : REAL(access)(path, how);
}
int faccessat(int folder, const char *path, int how, int flags) {
    return named("access", READS, folder, path) == FAIL ? -1 : REAL(faccessat)(folder, path, how, flags);
}
ssize_t readlink(const char *path, char *target, size_t length) {
    return named("readlink", READS, AT_FDCWD, path) == FAIL ? -1 : REAL(readlink)(path, target, length);
}
ssize_t readlinkat(int folder, const char *path, char *target, size_t length) {
    return named("readlink", READS, folder, path) == FAIL ? -1 : REAL(readlinkat)(folder, path, target, length);
}

DIR *opendir(const char *path) {
    return named("opendir", READS, AT_FDCWD, path) == FAIL ? NULL : REAL(opendir)(path);
}
DIR *fdopendir(int descriptor) {
    return on_descriptor("opendir", READS, descriptor, "") == FAIL ? NULL : REAL(fdopendir)(descriptor);
}
#define READDIR(name, type) type *name(DIR *folder) { \
    return on_descriptor("readdir", READS, dirfd(folder), "") == FAIL ? NULL : REAL(name)(folder); }
READDIR(readdir, struct dirent) READDIR(readdir64, struct dirent64)
