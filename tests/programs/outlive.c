// SPDX-License-Identifier: Apache-2.0
/*
 * outlive.c - processes that share the memory of one that has mapped a file, and go on when that has ended.
 *
 * outlive FILE: one such process for each way to make it. Then {"ready": true, "pooled": N}, N makers of which the pool
 * served the mapping; a line on stdin; and {"NAME": wrong words, ...}, all words of FILE read by each, or minus the
 * signal that has ended it. The word at each offset of FILE is the offset ^ 0x5151.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define STACK_BYTES (256u << 10)

enum way { BY_LIBC, BY_INSTRUCTION, BY_CLONE3, BY_VFORK, MAPS_AFTERWARDS, WAYS };

static const char *const name[] = { "libc", "instruction", "clone3", "vfork", "maps_afterwards" };

static struct {
	volatile int pid, pooled; /* pid: once it runs */
	volatile long wrong;
} *said; /* one a way; all share it */
static const uint64_t *map;
static size_t words;
static int go; /* the end of a pipe */
static enum way way;

/* In the memory that its maker has left. */
static int child(void *unused)
{
	long wrong = 0;
	char byte;

	(void)unused;
	said[way].pid = (int)syscall(SYS_getpid);
	if (read(go, &byte, 1) != 1)
		_exit(2);
	for (size_t i = 0; i < words; i++)
		wrong += map[i] != (i * 8 ^ 0x5151);
	said[way].wrong = wrong;
	_exit(0);
}

#if defined(__x86_64__)
/* By no function of libc's: child() on another stack. */
static long by_instruction(long number, unsigned long a, unsigned long b, char *stack)
{
	long ret;

	((void **)stack)[-2] = (void *)child;
	__asm__ volatile("mov %[stack], %%r12\n\t"
			 "syscall\n\t"
			 "test %%rax, %%rax\n\t"
			 "jnz 1f\n\t"
			 "xor %%ebp, %%ebp\n\t"
			 "mov -16(%%r12), %%rax\n\t"
			 "and $-16, %%rsp\n\t"
			 "call *%%rax\n\t"
			 "1:"
			 : "=a"(ret)
			 : "0"(number), "D"(a), "S"(b), "d"(0ul), [stack] "r"(stack)
			 : "rcx", "r11", "r12", "memory");
	return ret;
}
#endif

static long make_child(char *stack)
{
	struct clone_args args = { .flags = CLONE_VM, .exit_signal = SIGCHLD,
				   .stack = (uintptr_t)stack - STACK_BYTES, .stack_size = STACK_BYTES - 64 };

	switch (way) {
#if defined(__x86_64__)
	case BY_INSTRUCTION:
		return by_instruction(SYS_clone, CLONE_VM | SIGCHLD, (uintptr_t)stack - 64, stack);
	case BY_CLONE3:
		return by_instruction(SYS_clone3, (uintptr_t)&args, sizeof(args), stack);
	case BY_VFORK: /* waits for its child, until it is killed */
		return by_instruction(SYS_clone, CLONE_VM | CLONE_VFORK | SIGCHLD, (uintptr_t)stack - 64, stack);
#else
	case BY_VFORK:
		return clone(child, stack, CLONE_VM | CLONE_VFORK | SIGCHLD, NULL);
#endif
	default:
		(void)args;
		return clone(child, stack, CLONE_VM | SIGCHLD, NULL);
	}
}

/* Whether memory without a name, and not the file, lies in the mapping's place. */
static int is_pools(void)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	char line[512], memfd = 0;

	while (maps && fgets(line, sizeof(line), maps))
		if (strtoul(line, NULL, 16) <= (uintptr_t)map && strtoul(strchr(line, '-') + 1, NULL, 16) > (uintptr_t)map)
			memfd = strstr(line, "memfd:") != NULL;
	if (maps)
		fclose(maps);
	return memfd;
}

static void map_file(const char *path)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	map = mmap(NULL, words * 8, PROT_READ, MAP_SHARED, fd, 0);
	close(fd);
	if (map == MAP_FAILED)
		_exit(3);
	said[way].pooled = is_pools();
	for (size_t i = 0; i < words / 16; i += 512)
		if (map[i] != (i * 8 ^ 0x5151))
			_exit(4);
}

static void maker(const char *path)
{
	char *stack = mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (way != MAPS_AFTERWARDS)
		map_file(path);
	if (stack == MAP_FAILED || make_child(stack + STACK_BYTES) < 0)
		_exit(5);
	if (way == MAPS_AFTERWARDS)
		map_file(path);
	_exit(0);
}

/* Until its child runs, and the maker has ended, or waits for the child. */
static void make(const char *path, int which)
{
	siginfo_t end;
	pid_t pid;

	way = (enum way)which;
	pid = fork();
	if (!pid)
		maker(path);
	while (!said[which].pid && waitid(P_PID, (id_t)pid, &end, WEXITED | WNOWAIT | WNOHANG) == 0)
		usleep(1000);
	if (which == BY_VFORK)
		kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);
}

int main(int argc, char **argv)
{
	struct stat st;
	int ends[2], pooled = 0, asked = 0, status;
	pid_t pid;

	if (argc != 2 || stat(argv[1], &st) || pipe(ends) || prctl(PR_SET_CHILD_SUBREAPER, 1))
		return 2;
	words = (size_t)st.st_size / 8;
	go = ends[0];
	said = mmap(NULL, sizeof(*said) * WAYS, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	for (int i = 0; i < WAYS; i++) {
		make(argv[1], i);
		pooled += said[i].pooled;
	}
	printf("{\"ready\": true, \"pooled\": %d}\n", pooled);
	fflush(stdout);
	while (asked != '\n' && asked != EOF)
		asked = getchar();
	if (write(ends[1], name, WAYS) != WAYS)
		return 3;
	while ((pid = wait(&status)) > 0)
		for (int i = 0; i < WAYS; i++)
			if (said[i].pid == pid && status)
				said[i].wrong = WIFSIGNALED(status) ? -WTERMSIG(status) : -1000 - WEXITSTATUS(status);
	for (int i = 0; i < WAYS; i++)
		printf("%s\"%s\": %ld", i ? ", " : "{", name[i], said[i].wrong);
	puts("}");
	return 0;
}
