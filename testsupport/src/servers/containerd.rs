//! containerd as in the sidecar overlay: content only, unprivileged.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use containerd_client::{
    services::v1::{CreateImageRequest, Image, images_client::ImagesClient},
    types::Descriptor,
};
use tempfile::TempDir;

use crate::copy_program;

use super::{NOBODY, Process, eventually, is_root, run};

/// A running containerd.
pub struct Containerd {
    binary: PathBuf,
    dir: TempDir,
    process: Option<Process>,
}

impl Containerd {
    /// The binaries of all supported versions.
    pub fn binaries() -> Vec<PathBuf> {
        let list = std::env::var("ARCHAWARE_TEST_CONTAINERDS")
            .expect("run tests with hack/test.sh: it builds the containerds");
        let binaries: Vec<PathBuf> = list.split(':').map(PathBuf::from).collect();
        assert!(binaries.len() >= 3, "{list}: 1.6, 1.7 and 2.x are wanted");
        binaries
    }

    /// Starts with the shipped configuration in a temporary folder.
    pub async fn start(binary: &Path) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let shipped = fs::read_to_string("manifests/sidecar/containerd.toml").unwrap();
        let (path, user) = (dir.path().to_str().unwrap(), run("id", &["-u"]));
        let user = if is_root() { NOBODY } else { user.trim() };
        let config = shipped
            .replace("/var/lib/containerd", &format!("{path}/root"))
            .replace("/run/containerd", path)
            .replace("65532", user);
        fs::write(dir.path().join("config.toml"), config).unwrap();
        // Its user cannot read the build folder.
        let own = dir.path().join("containerd");
        copy_program(binary, &own);
        let mut containerd = Self {
            binary: own,
            dir,
            process: None,
        };
        containerd.restart().await;
        containerd
    }

    /// Stops it if it runs, and starts it with the same data.
    pub async fn restart(&mut self) {
        self.kill();
        let config = self.dir.path().join("config.toml");
        let arguments = ["--config", config.to_str().unwrap()];
        let log = self.dir.path().join("log");
        let process = Process::start(self.binary.to_str().unwrap(), &arguments, &log, true);
        let process = self.process.insert(process);
        let socket = socket_in(self.dir.path());
        eventually("containerd's socket", || {
            assert!(
                !process.has_ended(),
                "{}",
                fs::read_to_string(&log).unwrap()
            );
            let version = std::process::Command::new("ctr")
                .args(["-a", &socket, "version"])
                .output();
            std::future::ready(version.unwrap().status.success().then_some(()))
        })
        .await;
    }

    pub fn kill(&mut self) {
        self.process = None;
        let _ = fs::remove_file(self.socket());
    }

    /// Stops it and deletes its data.
    pub fn wipe(&mut self) {
        self.kill();
        fs::remove_dir_all(self.dir.path().join("root")).unwrap();
    }

    pub fn signal(&self, signal: &str) {
        self.process.as_ref().unwrap().signal(signal);
    }

    /// Runs a program as another unprivileged user and requires success.
    #[allow(clippy::unused_self, reason = "a stranger to this containerd")]
    pub fn as_stranger(&self, command: &[&str]) -> String {
        if is_root() {
            let stranger = ["--reuid", "65533", "--regid", "65533", "--clear-groups"];
            run("setpriv", &[&stranger, command].concat())
        } else {
            run(command[0], &command[1..])
        }
    }

    /// Limits the size of its files, to simulate a full disk.
    pub fn limit_files(&self, bytes: &str) {
        let pid = self.process.as_ref().unwrap().id().to_string();
        let limit = format!("--fsize={bytes}:unlimited");
        let prlimit = ["prlimit", "--pid", &pid, &limit];
        if is_root() {
            // A user may lower the limits of its own processes.
            run(
                "setpriv",
                &[
                    &["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"],
                    &prlimit[..],
                ]
                .concat(),
            );
        } else {
            run(prlimit[0], &prlimit[1..]);
        }
    }

    pub fn socket(&self) -> String {
        socket_in(self.dir.path())
    }

    /// A folder that its user can write.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The output of ctr in a namespace.
    pub fn ctr(&self, namespace: &str, arguments: &[&str]) -> String {
        let socket = self.socket();
        run(
            "ctr",
            &[&["-a", &socket, "-n", namespace], arguments].concat(),
        )
    }

    /// Writes a document into a namespace.
    pub fn ingest(&self, namespace: &str, blob: &testimg::Blob) {
        let file = self.dir.path().join("blob");
        fs::write(&file, &blob.bytes).unwrap();
        let (socket, digest) = (self.socket(), &blob.digest);
        let ingest =
            format!("ctr -a {socket} -n {namespace} content ingest --expected-digest {digest} ref");
        run("sh", &["-c", &format!("{ingest} < {}", file.display())]);
    }

    /// Creates an image record, as a pull does.
    pub async fn image_record(&self, namespace: &str, name: &str, root: &testimg::Blob) {
        let channel = tonic::transport::Endpoint::try_from(format!("unix://{}", self.socket()))
            .unwrap()
            .connect()
            .await
            .unwrap();
        let mut images = ImagesClient::new(channel);
        let target = Descriptor {
            media_type: root.media_type.clone(),
            digest: root.digest.clone(),
            size: i64::try_from(root.bytes.len()).unwrap(),
            ..Descriptor::default()
        };
        let image = Image {
            name: name.to_owned(),
            target: Some(target),
            ..Image::default()
        };
        let mut request = tonic::Request::new(CreateImageRequest {
            image: Some(image),
            ..CreateImageRequest::default()
        });
        let header = namespace.parse().unwrap();
        request
            .metadata_mut()
            .insert("containerd-namespace", header);
        images.create(request).await.unwrap();
    }

    /// Runs the garbage collector.
    pub fn collect(&self) {
        self.ctr("archaware", &["content", "prune", "references"]);
    }

    /// Whether archaware's namespace contains a digest.
    pub fn holds(&self, digest: &str) -> bool {
        self.ctr("archaware", &["content", "ls", "-q"])
            .lines()
            .any(|line| line == digest)
    }
}

fn socket_in(folder: &Path) -> String {
    let socket = folder.join("containerd.sock");
    socket.to_str().unwrap().to_owned()
}
