// SPDX-License-Identifier: Apache-2.0
/*
 * uffdprefetch.c - `srun --uffdprefetch[=OPTIONS] CMD`: each node's tasks are served as under `uffdprefetch wrap`.
 *
 *     cc -shared -fPIC -O2 -o uffdprefetch.so uffdprefetch.c
 *     plugstack.conf: optional /usr/lib64/slurm/uffdprefetch.so [program=/opt/uffdprefetch/bin/uffdprefetch]
 *
 * A plugin cannot put a word before the task's own (Slurm 22.05 has no spank_prepend_task_argv). So slurmstepd
 * starts, as the user, one `wrap` on each node, whose command writes down its environment and waits for the end of
 * its standard input; each task gets from there what `wrap` would have given it (LD_PRELOAD and variables of ours).
 * With the step ends that input, so `wrap` writes its summary; its last lines are in slurmd's log, since by then nobody
 * reads what the tasks write. Whatever goes wrong, the tasks run as if none of this were here, and the first one on a node says why.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <pwd.h>
#include <signal.h>
#include <slurm/spank.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

SPANK_PLUGIN(uffdprefetch, 1);

#define NAME "uffdprefetch"
/* A service comes up in tenths of a second; a node that is starting many tasks takes longer. */
#define READY_MS 10000
/* For the summary, when the step ends. */
#define END_MS 8000
#define ENVIRONMENT_MAX (1 << 20)
#define WORDS_MAX 64

/* What `wrap` changes in a job's environment (launch/launcher.py, job_environment). */
static const char *const taken[] = { "UFFDPREFETCH_", "LD_PRELOAD=", "ASAN_OPTIONS=", "PYTHONPATH=" };

static int wanted;
static char options[4096], program[4096] = NAME;
static char directory[64];
static pid_t holder;
static int its_input = -1, its_words = -1, its_directory = -1;

static int take(int val, const char *arg, int remote)
{
	(void)val;
	(void)remote;
	wanted = 1;
	/* left out it comes as NULL in srun and as "" on the nodes */
	snprintf(options, sizeof(options), "%s", arg ? arg : "");
	return 0;
}

static struct spank_option option = {
	NAME, "OPTIONS", "read the files that the tasks map ahead of them (options of uffdprefetch wrap)",
	2 /* optional */, 0, take,
};

int slurm_spank_init(spank_t sp, int argc, char **argv)
{
	for (int i = 0; i < argc; i++)
		if (!strncmp(argv[i], "program=", 8))
			snprintf(program, sizeof(program), "%s", argv[i] + 8);
	return spank_option_register(sp, &option) == ESPANK_SUCCESS ? 0 : -1;
}

static void sleep_ms(long ms)
{
	struct timespec t = { .tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000 };

	while (nanosleep(&t, &t) && errno == EINTR)
		;
}

/* Adds "NAME=VALUE" of a number of Slurm's own, which the job's environment does not have at this point. */
static size_t add(char **environment, size_t count, spank_t sp, const char *name, spank_item_t item)
{
	uint32_t value;
	char *text;

	if (spank_get_item(sp, item, &value) == ESPANK_SUCCESS && asprintf(&text, "%s=%u", name, value) >= 0)
		environment[count++] = text;
	return count;
}

/* The child: all of root's rights are given up, then it is `wrap`. */
static void become_wrap(spank_t sp, uid_t uid, gid_t gid, int input, int words)
{
	char *word[WORDS_MAX + 16], *text = options, *save = NULL, file[sizeof(directory) + 8];
	char **job = NULL, **environment;
	struct passwd *user;
	size_t n = 0, count = 0, null;

	sigset_t none;

	sigemptyset(&none); /* slurmstepd has most of them blocked */
	sigprocmask(SIG_SETMASK, &none, NULL);
	if (seteuid(0))
		errno = 0; /* slurmstepd of a test that is no root's */
	user = getpwuid(uid);
	if (user && initgroups(user->pw_name, gid))
		errno = 0;
	if (setgid(gid) || setuid(uid))
		_exit(126);
	spank_get_item(sp, S_JOB_ENV, &job);
	while (job && job[count])
		count++;
	environment = calloc(count + 4, sizeof(*environment));
	if (!environment)
		_exit(126);
	memcpy(environment, job, count * sizeof(*environment));
	count = add(environment, count, sp, "SLURM_STEP_ID", S_JOB_STEPID);
	count = add(environment, count, sp, "SLURM_NODEID", S_JOB_NODEID);
	count = add(environment, count, sp, "SLURM_STEP_NUM_NODES", S_JOB_NNODES);
	for (word[n++] = program, word[n++] = "wrap"; n < WORDS_MAX; n++) {
		word[n] = strtok_r(text, " \t", &save);
		text = NULL;
		if (!word[n])
			break;
		if (word[n][0] != '-' && (n == 2 || word[n - 1][0] != '-')) {
			dprintf(words, NAME ": %s is no option of wrap, nor the value of one\n", word[n]);
			_exit(2);
		}
	}
	snprintf(file, sizeof(file), "%s/env", directory);
	word[n++] = "--";
	word[n++] = "sh";
	word[n++] = "-c";
	word[n++] = "env -0 > \"$0.part\" && mv \"$0.part\" \"$0\" && exec cat > /dev/null";
	word[n++] = file;
	word[n] = NULL;
	null = (size_t)open("/dev/null", O_WRONLY);
	dup2(input, 0);
	dup2((int)null, 1);
	dup2(words, 2);
	for (int fd = 3; fd < 1024; fd++)
		close(fd);
	signal(SIGPIPE, SIG_DFL);
	setsid(); /* signals of the step are for its tasks */
	for (size_t i = 0; environment[i]; i++)
		if (!strncmp(environment[i], "PATH=", 5))
			putenv(environment[i]);
	execvpe(program, word, environment);
	fprintf(stderr, NAME ": cannot run %s: %s\n", program, strerror(errno));
	_exit(127);
}

static void clean_up(void)
{
	if (its_directory >= 0) {
		unlinkat(its_directory, "env", 0);
		unlinkat(its_directory, "env.part", 0);
		close(its_directory);
	}
	if (directory[0])
		rmdir(directory); /* follows no link */
	its_directory = -1;
	directory[0] = 0;
	holder = 0;
}

/* In slurmstepd, once on each node, before its tasks are made. */
int slurm_spank_user_init(spank_t sp, int argc, char **argv)
{
	int input[2] = { -1, -1 }, words[2] = { -1, -1 };
	uid_t uid;
	gid_t gid;

	(void)argc;
	(void)argv;
	if (!wanted || !spank_remote(sp))
		return 0;
	snprintf(directory, sizeof(directory), "/tmp/" NAME "-spank-XXXXXX");
	if (spank_get_item(sp, S_JOB_UID, &uid) != ESPANK_SUCCESS ||
	    spank_get_item(sp, S_JOB_GID, &gid) != ESPANK_SUCCESS || !mkdtemp(directory)) {
		slurm_error(NAME ": the tasks run without: %s", strerror(errno));
		directory[0] = 0;
		return 0;
	}
	/* Held: by its name it may be another one later, which is the user's to say. */
	its_directory = open(directory, O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (its_directory < 0 || fchown(its_directory, uid, gid) || pipe2(input, O_CLOEXEC) ||
	    pipe2(words, O_CLOEXEC) || (holder = fork()) < 0) {
		slurm_error(NAME ": the tasks run without: %s", strerror(errno));
		for (int i = 0; i < 2; i++) {
			close(input[i]);
			close(words[i]);
		}
		clean_up();
		return 0;
	}
	if (!holder)
		become_wrap(sp, uid, gid, input[0], words[1]);
	close(input[0]);
	close(words[1]);
	its_input = input[1];
	its_words = words[0];
	return 0;
}

/* Whether wrap has ended: nobody holds the other end of what it says through. */
static int is_gone(void)
{
	struct pollfd p = { .fd = its_words };

	return poll(&p, 1, 0) > 0 && p.revents & POLLHUP;
}

/* Waits until wrap's command has written its environment; how long that file is, or -1. */
static ssize_t read_environment(char *into)
{
	char file[sizeof(directory) + 8];
	ssize_t got = -1;
	int fd = -1;

	snprintf(file, sizeof(file), "%s/env", directory);
	for (int waited = 0; fd < 0 && waited < READY_MS; waited += 10) {
		fd = open(file, O_RDONLY | O_CLOEXEC);
		if (fd < 0) {
			if (is_gone())
				return -1; /* it has said why */
			sleep_ms(10);
		}
	}
	if (fd >= 0) {
		got = read(fd, into, ENVIRONMENT_MAX);
		close(fd);
	}
	return got;
}

/* What wrap has said, through the standard error of a task. */
static void say_why(void)
{
	char text[4096];
	ssize_t n;

	fcntl(its_words, F_SETFL, O_NONBLOCK);
	while ((n = read(its_words, text, sizeof(text))) > 0)
		if (write(2, text, (size_t)n) < 0)
			break;
}

/* In each task, as the user, before its execve(). */
int slurm_spank_task_init(spank_t sp, int argc, char **argv)
{
	char *all, *name;
	ssize_t length;
	int task;

	(void)argc;
	(void)argv;
	if (!wanted || !holder || !(all = calloc(1, ENVIRONMENT_MAX + 1)))
		return 0;
	length = read_environment(all);
	if (length < 0 && spank_get_item(sp, S_TASK_ID, &task) == ESPANK_SUCCESS && !task)
		say_why();
	for (name = all; length > 0 && name < all + length; name += strlen(name) + 1)
		for (size_t i = 0; i < sizeof(taken) / sizeof(*taken); i++) {
			char *value = strchr(name, '=');
			char key[256];

			if (strncmp(name, taken[i], strlen(taken[i])) || !value ||
			    (size_t)(value - name) >= sizeof(key))
				continue;
			memcpy(key, name, (size_t)(value - name));
			key[value - name] = 0;
			spank_setenv(sp, key, value + 1, 1);
		}
	free(all);
	return 0;
}

/* What wrap said, to slurmd's log, a line at a time. */
static void pass_on(void)
{
	char text[4096];
	ssize_t n;

	while ((n = read(its_words, text, sizeof(text) - 1)) > 0) {
		text[n] = 0;
		for (char *save = NULL, *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save))
			slurm_spank_log("%s", line);
	}
}

/* In slurmstepd, when all tasks have ended. */
int slurm_spank_exit(spank_t sp, int argc, char **argv)
{
	int waited = 0;

	(void)argc;
	(void)argv;
	if (!holder || !spank_remote(sp))
		return 0;
	close(its_input);
	fcntl(its_words, F_SETFL, O_NONBLOCK);
	while (waited < END_MS && !waitpid(holder, NULL, WNOHANG)) {
		pass_on(); /* what is not read keeps it from its end */
		sleep_ms(10);
		waited += 10;
	}
	if (waited >= END_MS) { /* it has a session of its own */
		kill(-holder, SIGKILL);
		waitpid(holder, NULL, 0);
	}
	pass_on();
	close(its_words);
	clean_up();
	return 0;
}
