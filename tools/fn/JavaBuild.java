// SPDX-License-Identifier: Apache-2.0
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.OutputStream;
import java.io.PrintWriter;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.jar.Attributes;
import java.util.jar.JarEntry;
import java.util.jar.JarOutputStream;
import java.util.jar.Manifest;
import java.util.stream.Stream;
import java.util.zip.Deflater;
import javax.tools.FileObject;
import javax.tools.ForwardingJavaFileManager;
import javax.tools.JavaCompiler;
import javax.tools.JavaFileManager;
import javax.tools.JavaFileObject;
import javax.tools.SimpleJavaFileObject;
import javax.tools.ToolProvider;

/**
 * Compiles a program whose file need not bear the name of its public class into main.jar: {@code JavaBuild SOURCE}. Other
 * .java files of the working folder are compiled with it. The main class is Main when it has a main method, else the first
 * top-level class that has one, else the first nested one.
 */
final class JavaBuild {
  /** A source that may hold a public class of any name. */
  private static final class Source extends SimpleJavaFileObject {
    private final Path path;

    Source(Path path) {
      super(path.toUri(), Kind.SOURCE);
      this.path = path;
    }

    @Override
    public String getName() {
      return path.toString();
    }

    @Override
    public boolean isNameCompatible(String simpleName, Kind kind) {
      return kind == Kind.SOURCE;
    }

    @Override
    public CharSequence getCharContent(boolean ignoreEncodingErrors) throws IOException {
      return new String(Files.readAllBytes(path), StandardCharsets.UTF_8);
    }
  }

  /** Keeps the classes in memory, by binary name in the order in which they were written. */
  private static final class Classes extends ForwardingJavaFileManager<JavaFileManager> {
    final Map<String, ByteArrayOutputStream> byName = new LinkedHashMap<>();

    Classes(JavaFileManager manager) {
      super(manager);
    }

    @Override
    public JavaFileObject getJavaFileForOutput(
        Location location, String name, JavaFileObject.Kind kind, FileObject sibling) {
      ByteArrayOutputStream bytes = new ByteArrayOutputStream();
      byName.put(name, bytes);
      return new SimpleJavaFileObject(java.net.URI.create("mem:///" + name.replace('.', '/').replace('$', '-')), kind) {
        @Override
        public OutputStream openOutputStream() {
          return bytes;
        }
      };
    }
  }

  /** Defines the compiled classes, to look at them; none is initialised. */
  private static final class Loader extends ClassLoader {
    private final Map<String, ByteArrayOutputStream> classes;

    Loader(Map<String, ByteArrayOutputStream> classes) {
      this.classes = classes;
    }

    @Override
    protected Class<?> findClass(String name) throws ClassNotFoundException {
      ByteArrayOutputStream bytes = classes.get(name);
      if (bytes == null) throw new ClassNotFoundException(name);
      return defineClass(name, bytes.toByteArray(), 0, bytes.size());
    }
  }

  private static boolean hasMain(Loader loader, String name) {
    try {
      int modifiers = loader.loadClass(name).getMethod("main", String[].class).getModifiers();
      return java.lang.reflect.Modifier.isStatic(modifiers);
    } catch (ReflectiveOperationException | LinkageError e) {
      return false;
    }
  }

  private static String mainClass(Map<String, ByteArrayOutputStream> classes) {
    Loader loader = new Loader(classes);
    List<String> order = new ArrayList<>();
    if (classes.containsKey("Main")) order.add("Main");
    for (String name : classes.keySet()) if (!name.contains("$")) order.add(name);
    for (String name : classes.keySet()) if (name.contains("$")) order.add(name);
    for (String name : order) if (hasMain(loader, name)) return name;
    return null;
  }

  private static void writeJar(String main, Map<String, ByteArrayOutputStream> classes) throws IOException {
    Manifest manifest = new Manifest();
    manifest.getMainAttributes().put(Attributes.Name.MANIFEST_VERSION, "1.0");
    manifest.getMainAttributes().put(Attributes.Name.MAIN_CLASS, main);
    try (JarOutputStream jar = new JarOutputStream(Files.newOutputStream(Path.of("main.jar")))) {
      jar.setLevel(Deflater.NO_COMPRESSION);
      JarEntry head = new JarEntry("META-INF/MANIFEST.MF");
      head.setTime(0);
      jar.putNextEntry(head);
      manifest.write(jar);
      for (Map.Entry<String, ByteArrayOutputStream> entry : classes.entrySet()) {
        JarEntry file = new JarEntry(entry.getKey().replace('.', '/') + ".class");
        file.setTime(0);
        jar.putNextEntry(file);
        entry.getValue().writeTo(jar);
      }
    }
  }

  public static void main(String[] args) throws IOException {
    Set<Path> paths = new LinkedHashSet<>();
    paths.add(Path.of(args[0]));
    try (Stream<Path> below = Files.walk(Path.of(""))) {
      below.filter(path -> path.toString().endsWith(".java") && Files.isRegularFile(path)).sorted().forEach(paths::add);
    }
    List<Source> sources = new ArrayList<>();
    for (Path path : paths) sources.add(new Source(path));
    JavaCompiler compiler = ToolProvider.getSystemJavaCompiler();
    Classes classes = new Classes(compiler.getStandardFileManager(null, null, StandardCharsets.UTF_8));
    List<String> options = List.of("-proc:none", "-implicit:none", "-Xmaxerrs", "20", "-Xmaxwarns", "20");
    if (!compiler.getTask(new PrintWriter(System.err, true), classes, null, options, null, sources).call()) System.exit(1);
    String main = mainClass(classes.byName);
    if (main == null) {
      System.err.println("error: no class has a method public static void main(String[])");
      System.exit(1);
    }
    writeJar(main, classes.byName);
  }
}
