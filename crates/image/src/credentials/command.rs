//! Runs credential programs: the request is written to stdin, the answer read from stdout.

use std::{
    collections::HashMap,
    io,
    process::{ExitStatus, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use futures::{
    FutureExt,
    future::{BoxFuture, Shared},
};
use parking_lot::Mutex;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    process::Command,
    sync::{OwnedSemaphorePermit, Semaphore, oneshot},
    task::JoinSet,
};

use archaware_base::tasks;

use crate::trace::{self, Call, Peer};

/// The kubelet's timeout.
const TIMEOUT: Duration = Duration::from_mins(1);
/// Maximum concurrent runs of one plugin, or of all helpers together, because a program may be an
/// interpreter with a cloud SDK.
pub(super) const MAX_CONCURRENT_RUNS: usize = 4;
const MAX_ANSWER: u64 = 1024 * 1024;

/// Why a program gave no answer. No message contains its output, because that may contain secrets.
#[derive(Debug, thiserror::Error)]
pub(super) enum CommandError {
    #[error("it cannot be run")]
    Run(#[from] io::Error),
    #[error("it ended with {0}; run it by hand to see why")]
    Failed(ExitStatus, Vec<u8>),
    #[error("its answer is malformed")]
    Malformed,
    #[error("it did not end within {} s", TIMEOUT.as_secs())]
    TimedOut,
    #[error("its answer is larger than 1 MiB")]
    TooLarge,
}

/// How long a pod waits for a program that runs. A slower program runs on, and the next attempt
/// uses its answer.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Runs programs, at most one per key at a time. Started programs keep running without waiters;
/// dropping `Programs` kills them.
pub(super) struct Programs<T> {
    tasks: Mutex<JoinSet<()>>,
    running: Arc<Mutex<HashMap<String, Running<T>>>>,
}

/// A program that runs.
#[derive(Clone)]
struct Running<T> {
    /// The image for which the plugin was started, or the name of the helper.
    subject: String,
    began: Instant,
    /// `None` if its task panicked or was aborted.
    answer: Shared<BoxFuture<'static, Option<T>>>,
}

/// Removes a program from `running` when dropped, so also when its task panics or is aborted.
struct RunningEntry<T> {
    running: Arc<Mutex<HashMap<String, Running<T>>>>,
    key: String,
}

impl<T> Drop for RunningEntry<T> {
    fn drop(&mut self) {
        self.running.lock().remove(&self.key);
    }
}

impl<T> Default for Programs<T> {
    fn default() -> Self {
        Self {
            tasks: Mutex::default(),
            running: Arc::default(),
        }
    }
}

impl<T: Clone + Send + Sync + 'static> Programs<T> {
    /// Returns the answer of the program that runs under `key`. If none runs, waits for one of
    /// `slots`, then returns the value of `known` (another run may have ended meanwhile) or starts
    /// `work`. Waits until [`ANSWER_TIMEOUT`] after the start of the run. If the caller drops the
    /// future before the start, nothing runs.
    ///
    /// # Errors
    ///
    /// The subject of the run, if the run takes longer or ends without an answer.
    pub(super) async fn run<F>(
        &self,
        key: &str,
        subject: &str,
        slots: &Arc<Semaphore>,
        known: impl Fn() -> Option<T>,
        work: impl FnOnce() -> F,
    ) -> Result<T, String>
    where
        F: Future<Output = T> + Send + 'static,
    {
        let joined = self.running.lock().get(key).cloned();
        let program = if let Some(running) = joined {
            running
        } else {
            // `ANSWER_TIMEOUT` does not include the wait for a slot. The caller limits that wait.
            let slot = slots.clone().acquire_owned().await;
            let slot = slot.map_err(|_| subject.to_owned())?;
            if let Some(known) = known() {
                return Ok(known);
            }
            self.start(key, subject, slot, work)
        };
        let until = program.began + ANSWER_TIMEOUT;
        let answer = tokio::time::timeout_at(until.into(), program.answer).await;
        if answer.is_err() {
            tracing::warn!(
                program = key,
                "the credential program did not answer in 5 s; the next attempt uses its answer"
            );
        }
        answer.ok().flatten().ok_or(program.subject)
    }

    /// Starts a run, unless another caller did meanwhile.
    fn start<F>(
        &self,
        key: &str,
        subject: &str,
        slot: OwnedSemaphorePermit,
        work: impl FnOnce() -> F,
    ) -> Running<T>
    where
        F: Future<Output = T> + Send + 'static,
    {
        let mut running = self.running.lock();
        if let Some(other) = running.get(key) {
            return other.clone();
        }
        let (sender, receiver) = oneshot::channel();
        let program = Running {
            subject: subject.to_owned(),
            began: Instant::now(),
            answer: receiver.map(Result::ok).boxed().shared(),
        };
        running.insert(key.to_owned(), program.clone());
        drop(running);
        let work = work();
        let entry = RunningEntry {
            running: self.running.clone(),
            key: key.to_owned(),
        };
        let running = async move {
            let answer = work.await;
            drop(entry);
            drop(slot);
            // All callers may be gone.
            let _ = sender.send(answer);
        };
        let mut running_tasks = self.tasks.lock();
        while running_tasks.try_join_next().is_some() {}
        running_tasks.spawn(tasks::timed("credential plugin", running));
        program
    }
}

/// Runs a program to its end. It is killed after [`TIMEOUT`] or when the future is dropped.
/// `subject` is the image or registry that the credential is for.
pub(super) async fn run(
    program: Command,
    subject: &str,
    question: &[u8],
) -> Result<Vec<u8>, CommandError> {
    let name = program.as_std().get_program().to_owned();
    let began = Instant::now();
    let answer = tokio::time::timeout(TIMEOUT, answer(program, question)).await;
    let answer = answer.unwrap_or(Err(CommandError::TimedOut));
    let call = Call {
        peer: Peer::Program,
        method: "run",
        host: &name.to_string_lossy(),
        path: &format!(" {subject}"),
        attempt: 1,
        credential: trace::NO_CREDENTIAL,
    };
    match &answer {
        Ok(_) => call.ended(began, "answered"),
        Err(error) => call.ended(began, error),
    }
    answer
}

async fn answer(mut program: Command, question: &[u8]) -> Result<Vec<u8>, CommandError> {
    let mut child = program
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        // A program that does not read its input may still answer.
        let _ = stdin.write_all(question).await;
    }
    let mut answer = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        stdout.take(MAX_ANSWER + 1).read_to_end(&mut answer).await?;
    }
    if answer.len() as u64 > MAX_ANSWER {
        return Err(CommandError::TooLarge);
    }
    let status = child.wait().await?;
    if status.success() {
        Ok(answer)
    } else {
        Err(CommandError::Failed(status, answer))
    }
}
